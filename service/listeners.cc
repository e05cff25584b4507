#include "service/listeners.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/server_address.h"
#include "service/events_config.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

struct AddressDelete {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};

// 0, or why not.
int Bind(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  // As those who will listen there do: what the kernel remembers of dead connections is no owner.
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bind(fd, address.ai_addr, address.ai_addrlen) == 0;
  const int error = bound ? 0 : errno;
  close(fd);
  return error;
}

absl::Status CheckListener(const char* option, const std::string& value, HostPort address,
                           bool with_port) {
  const auto cannot = [&](absl::string_view why) {
    return absl::UnavailableError(
        absl::StrCat("--", option, " ", value, ": cannot listen there: ", why));
  };
  if (!with_port) address.port = 0;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int unresolved =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (unresolved != 0) return cannot(gai_strerror(unresolved));
  const std::unique_ptr<addrinfo, AddressDelete> found(list);
  int error = 0;
  for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
    error = Bind(*a);
    if (error == 0) return absl::OkStatus();
  }
  // Who listens on all addresses is content with those of IPv4 where there is no IPv6.
  if (address.host == "::" && (error == EAFNOSUPPORT || error == EADDRNOTAVAIL)) {
    return CheckListener(option, value, {"0.0.0.0", address.port}, true);
  }
  return cannot(error == 0 ? "it has no address" : std::strerror(error));
}

}  // namespace

absl::Status CheckListeners(const Config& config, bool with_ports) {
  for (const auto& [option, value] :
       {std::pair<const char*, const std::string&>("listen", config.listen),
        {"admin", config.admin},
        {"metrics", config.metrics}}) {
    if (value.empty()) continue;
    KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(value));
    KVMILL_RETURN_IF_ERROR(CheckListener(option, value, address, with_ports));
  }
  for (const auto& [option, value] :
       {std::pair<const char*, const std::string&>("events", config.events),
        {"events-replay", config.events_replay}}) {
    if (value.empty()) continue;
    KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseEventsAddress(value));
    KVMILL_RETURN_IF_ERROR(CheckListener(option, value, address, with_ports));
  }
  if (config.ucx.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseUcxAddress(config.ucx));
  return CheckListener("ucx", config.ucx, address, with_ports);
}

}  // namespace kvmill
