#include "client/transport/ucx_handles.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvmill {
namespace {

// What a function of UCX prints. UCX 1.13 tells some things in no other way.
std::string Printed(const std::function<void(FILE*)>& print) {
  char* text = nullptr;
  std::size_t bytes = 0;
  FILE* const file = open_memstream(&text, &bytes);
  if (file == nullptr) return "";
  print(file);
  std::fclose(file);
  std::string result(text, bytes);
  std::free(text);
  return result;
}

}  // namespace

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

absl::StatusOr<UcxConfig> UcxConfig::Read() {
  ucp_config_t* config = nullptr;
  const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError("UCX's configuration", status);
  return UcxConfig(config);
}

UcxConfig::~UcxConfig() {
  if (config_ != nullptr) ucp_config_release(config_);
}

absl::Status UcxConfig::Set(const std::string& name, const std::string& value) {
  const ucs_status_t status = ucp_config_modify(config_, name.c_str(), value.c_str());
  if (status == UCS_OK) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("UCX setting ", name, "=", value, ": ", ucs_status_string(status)));
}

std::string UcxConfig::Get(absl::string_view name) const {
  const std::string text = Printed(
      [this](FILE* file) { ucp_config_print(config_, file, nullptr, UCS_CONFIG_PRINT_CONFIG); });
  const std::string begin = absl::StrCat("UCX_", name, "=");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, begin)) return std::string(line.substr(begin.size()));
  }
  return "";
}

absl::StatusOr<UcxContext> UcxContext::Make(const UcxConfig& config) {
  ucp_params_t parameters{};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  parameters.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  parameters.name = "kvmill";
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucp_init(&parameters, config.get(), &context);
  if (status != UCS_OK) return UcxError("UCX's context", status);
  return UcxContext(context);
}

UcxContext::~UcxContext() {
  if (context_ != nullptr) ucp_cleanup(context_);
}

std::vector<std::string> UcxContext::Resources() const {
  const std::string text = Printed([this](FILE* file) { ucp_context_print_info(context_, file); });
  // "# resource 2  :  md 1  dev 1  flags -- tcp/lo"
  std::vector<std::string> names;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StrContains(line, " resource ")) continue;
    const std::size_t space = line.find_last_of(' ');
    if (space != absl::string_view::npos && absl::StrContains(line.substr(space), '/')) {
      names.emplace_back(line.substr(space + 1));
    }
  }
  return names;
}

std::uint64_t UcxContext::memory_types() const {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context_, &attributes) != UCS_OK) return 0;
  return attributes.memory_types;
}

absl::StatusOr<UcxWorker> UcxWorker::Make(const UcxContext& context) {
  ucp_worker_params_t parameters{};
  parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
  // Made on one thread, run on another.
  parameters.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  parameters.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
  ucp_worker_h worker = nullptr;
  const ucs_status_t status = ucp_worker_create(context.get(), &parameters, &worker);
  if (status != UCS_OK) return UcxError("UCX's worker", status);
  return UcxWorker(worker);
}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
}

absl::StatusOr<UcxListener> UcxListener::Make(const UcxWorker& worker, const SocketAddress& address,
                                              ucp_listener_conn_callback_t callback,
                                              void* argument) {
  ucp_listener_params_t parameters{};
  parameters.field_mask =
      UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  parameters.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address.storage);
  parameters.sockaddr.addrlen = address.bytes;
  parameters.conn_handler.cb = callback;
  parameters.conn_handler.arg = argument;
  ucp_listener_h listener = nullptr;
  const ucs_status_t status = ucp_listener_create(worker.get(), &parameters, &listener);
  if (status != UCS_OK) return UcxError(absl::StrCat("listening on ", address.ToString()), status);
  return UcxListener(listener);
}

UcxListener::~UcxListener() {
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
}

absl::StatusOr<SocketAddress> UcxListener::address() const {
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  const ucs_status_t status = ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) return UcxError("a listener's address", status);
  SocketAddress address;
  address.storage = attributes.sockaddr;
  address.bytes = address.is_ipv6() ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return address;
}

std::vector<std::string> UcxEndpointTransports(ucp_ep_h endpoint) {
  const std::string text = Printed([endpoint](FILE* file) { ucp_ep_print_info(endpoint, file); });
  // "#                 lane[1]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] am am_bw#0"
  std::vector<std::string> names;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StrContains(line, "lane[")) continue;
    for (const absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
      const std::size_t slash = word.find('/');
      const std::size_t colon = word.find(':');
      if (slash == absl::string_view::npos || colon == absl::string_view::npos || colon > slash) {
        continue;
      }
      std::string name(word.substr(colon + 1));
      const std::size_t dot = name.rfind('.');  // The path's index.
      if (dot != std::string::npos) name.resize(dot);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      break;
    }
  }
  return names;
}

}  // namespace kvmill
