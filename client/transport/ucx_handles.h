// One owner per UCX handle. Internal to the UCX transport: only its sources include this.
#ifndef KVMILL_CLIENT_TRANSPORT_UCX_HANDLES_H_
#define KVMILL_CLIENT_TRANSPORT_UCX_HANDLES_H_

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/transport/socket_address.h"

namespace kvmill {

// UNAVAILABLE with UCX's words.
absl::Status UcxError(absl::string_view what, ucs_status_t status);

class UcxConfig {
 public:
  static absl::StatusOr<UcxConfig> Read();
  UcxConfig(UcxConfig&& other) noexcept : config_(std::exchange(other.config_, nullptr)) {}
  ~UcxConfig();
  // INVALID_ARGUMENT naming a setting that UCX does not take.
  absl::Status Set(const std::string& name, const std::string& value);
  // As the environment or Set left it; empty when there is none.
  std::string Get(absl::string_view name) const;
  ucp_config_t* get() const { return config_; }

 private:
  explicit UcxConfig(ucp_config_t* config) : config_(config) {}
  ucp_config_t* config_;
};

class UcxContext {
 public:
  static absl::StatusOr<UcxContext> Make(const UcxConfig& config);
  UcxContext(UcxContext&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  ~UcxContext();
  ucp_context_h get() const { return context_; }
  // "tcp/eth0", "rc_verbs/mlx5_0:1" …: what this host has and the configuration allows.
  std::vector<std::string> Resources() const;
  std::uint64_t memory_types() const;

 private:
  explicit UcxContext(ucp_context_h context) : context_(context) {}
  ucp_context_h context_;
};

class UcxWorker {
 public:
  static absl::StatusOr<UcxWorker> Make(const UcxContext& context);
  UcxWorker(UcxWorker&& other) noexcept : worker_(std::exchange(other.worker_, nullptr)) {}
  ~UcxWorker();
  ucp_worker_h get() const { return worker_; }

 private:
  explicit UcxWorker(ucp_worker_h worker) : worker_(worker) {}
  ucp_worker_h worker_;
};

class UcxListener {
 public:
  static absl::StatusOr<UcxListener> Make(const UcxWorker& worker, const SocketAddress& address,
                                          ucp_listener_conn_callback_t callback, void* argument);
  UcxListener(UcxListener&& other) noexcept : listener_(std::exchange(other.listener_, nullptr)) {}
  ~UcxListener();
  ucp_listener_h get() const { return listener_; }
  absl::StatusOr<SocketAddress> address() const;

 private:
  explicit UcxListener(ucp_listener_h listener) : listener_(listener) {}
  ucp_listener_h listener_;
};

// Names of the transports behind an endpoint's lanes, without repetition: "tcp/lo".
std::vector<std::string> UcxEndpointTransports(ucp_ep_h endpoint);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_UCX_HANDLES_H_
