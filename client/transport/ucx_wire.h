// A Wire that is an endpoint of UCX. Internal to the UCX transport; of its thread.
#ifndef KVMILL_CLIENT_TRANSPORT_UCX_WIRE_H_
#define KVMILL_CLIENT_TRANSPORT_UCX_WIRE_H_

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/transport/socket_address.h"
#include "client/transport/wire.h"

namespace kvmill {

class UcxWire;

// The wires of one worker: whose message is it, and who has something to do outside of UCX.
class UcxWires {
 public:
  explicit UcxWires(ucp_worker_h worker) : worker_(worker) {}

  ucp_worker_h worker() const { return worker_; }
  void Know(ucp_ep_h endpoint, UcxWire* wire) { by_endpoint_[endpoint] = wire; }
  void Forget(ucp_ep_h endpoint, UcxWire* wire);
  UcxWire* Find(ucp_ep_h endpoint) const;  // Null: nobody's, or closed.
  void NeedsAttention(UcxWire* wire) { attention_.push_back(wire); }
  void ForgetAttention(UcxWire* wire);
  bool wanted() const { return !attention_.empty(); }
  // Outside of UCX. True: somebody had something to do.
  bool Attend();

 private:
  const ucp_worker_h worker_;
  std::unordered_map<ucp_ep_h, UcxWire*> by_endpoint_;
  std::vector<UcxWire*> attention_;
};

// An endpoint and what UCX works on for it.
class UcxWire final : public Wire {
 public:
  // Both outlive it.
  UcxWire(UcxWires* wires, WireEvents* events) : wires_(wires), events_(events) {}
  ~UcxWire() override;

  absl::Status Dial(const SocketAddress& address);
  absl::Status Accept(ucp_conn_request_h request);

  void Send(const Outgoing& message, WireOperation* operation) override;
  void Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind memory,
               WireOperation* operation) override;
  void Drop(void* token) override;
  void Close() override;
  std::string transport_name() const override;
  std::string peer_address() const override;

  bool OnMessage(const WireMessage& message) {
    return !close_wanted_ && events_->OnMessage(message);
  }
  // On the loop, outside of UCX: what callbacks only noted.
  void Attend();

 private:
  // One request of UCX. Reused; the list must live as long as the request.
  struct Pending {
    UcxWire* wire = nullptr;
    WireOperation* operation = nullptr;
    std::vector<ucp_dt_iov_t> list;
  };

  absl::Status Make(ucp_ep_params_t* parameters);
  Pending* Take(WireOperation* operation, absl::Span<const WirePiece> pieces);
  void Finish(Pending* pending, ucs_status_t status);
  // What an immediate result of UCX means for the operation.
  void Started(Pending* pending, ucs_status_ptr_t result);
  static void OnSent(void* request, ucs_status_t status, void* pending);
  static void OnReceived(void* request, ucs_status_t status, std::size_t bytes, void* pending);
  static void OnEndpointError(void* wire, ucp_ep_h endpoint, ucs_status_t status);
  static void OnEndpointClosed(void* request, ucs_status_t status, void* wire);

  UcxWires* const wires_;
  WireEvents* const events_;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t error_ = UCS_OK;
  bool error_told_ = false;
  bool close_wanted_ = false;
  bool close_started_ = false;
  bool close_done_ = false;
  bool closed_told_ = false;
  std::size_t outstanding_ = 0;  // Requests of UCX.
  std::vector<std::unique_ptr<Pending>> free_;
};

ucs_memory_type_t UcxMemory(MemoryKind memory);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_UCX_WIRE_H_
