#include "service/http_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/status_page.h"

namespace kvmill {
namespace {

// A probe must be answered whatever else is connected: the server works on all connections at once,
// silent ones are closed, and when there are many the oldest one, however busy it looks, gives way.
constexpr unsigned kSilentSecondsMax = 5;
constexpr std::size_t kConnectionsMax = 64;

constexpr char kHtml[] = "text/html; charset=utf-8";

struct AddressDelete {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};

int SocketOf(MHD_Connection* connection) {
  const MHD_ConnectionInfo* info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  return info == nullptr ? -1 : info->connect_fd;
}

// Whether the other end is an address of the loopback interface; false when it is not known.
bool IsLocal(MHD_Connection* connection) {
  const MHD_ConnectionInfo* info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  if (info == nullptr || info->client_addr == nullptr) return false;
  if (info->client_addr->sa_family == AF_INET) {
    sockaddr_in address;
    std::memcpy(&address, info->client_addr, sizeof(address));
    return (ntohl(address.sin_addr.s_addr) >> 24) == 127;
  }
  if (info->client_addr->sa_family != AF_INET6) return false;
  sockaddr_in6 address;
  std::memcpy(&address, info->client_addr, sizeof(address));
  const std::uint8_t* bytes = address.sin6_addr.s6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address.sin6_addr)) return bytes[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&address.sin6_addr);
}

HttpServer::Asker AskerOf(MHD_Connection* connection) {
  HttpServer::Asker asker;
  asker.is_local = IsLocal(connection);
  const MHD_ConnectionInfo* info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  if (info != nullptr && info->client_addr != nullptr) {
    char host[NI_MAXHOST];
    const bool is_ipv6 = info->client_addr->sa_family == AF_INET6;
    if (getnameinfo(info->client_addr, is_ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), host,
                    sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0) {
      asker.host = host;
    }
  }
  const char* const authorization =
      MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
  if (authorization != nullptr) asker.authorization = authorization;
  return asker;
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const HostPort& address, Handlers handlers)
      : address_(address), handlers_(std::move(handlers)) {}

  ~Impl() {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  absl::Status Start() {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const int error =
        getaddrinfo(address_.host.c_str(), std::to_string(address_.port).c_str(), &hints, &list);
    if (error != 0) return CannotListen(gai_strerror(error));
    const std::unique_ptr<addrinfo, AddressDelete> found(list);
    int start_error = 0;
    for (const addrinfo* a = found.get(); a != nullptr && daemon_ == nullptr; a = a->ai_next) {
      const unsigned family = a->ai_family == AF_INET6 ? MHD_USE_IPv6 : MHD_NO_FLAG;
      errno = 0;
      daemon_ = MHD_start_daemon(
          MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO | family, 0, nullptr, nullptr, &Answer,
          this, MHD_OPTION_SOCK_ADDR, a->ai_addr, MHD_OPTION_CONNECTION_TIMEOUT, kSilentSecondsMax,
          MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(2 * kConnectionsMax),
          MHD_OPTION_NOTIFY_CONNECTION, &Notify, this, MHD_OPTION_END);
      if (daemon_ == nullptr) start_error = errno;
    }
    if (daemon_ == nullptr) {
      return CannotListen(start_error == 0 ? "no address of it can be used"
                                           : std::strerror(start_error));
    }
    const MHD_DaemonInfo* info = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT);
    if (info == nullptr || info->port == 0) return CannotListen("the port is not known");
    address_.port = info->port;
    return absl::OkStatus();
  }

  const HostPort& address() const { return address_; }

 private:
  absl::Status CannotListen(absl::string_view why) const {
    return absl::UnavailableError(
        absl::StrCat("--metrics ", address_.ToString(), ": cannot listen there: ", why));
  }

  // Connections in the order in which they came; on the server's thread only. `place` is ours to
  // keep with the connection.
  static void Notify(void* self, MHD_Connection* connection, void** place,
                     MHD_ConnectionNotificationCode code) {
    std::list<MHD_Connection*>& connections = static_cast<Impl*>(self)->connections_;
    using Place = std::list<MHD_Connection*>::iterator;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      if (*place == nullptr) return;
      connections.erase(*static_cast<Place*>(*place));
      delete static_cast<Place*>(*place);
      *place = nullptr;
      return;
    }
    *place = new Place(connections.insert(connections.end(), connection));
    // The library notices the end of a socket that was shut down and closes the connection.
    if (connections.size() > kConnectionsMax) shutdown(SocketOf(connections.front()), SHUT_RDWR);
  }

  static MHD_Result Answer(void* self, MHD_Connection* connection, const char* url,
                           const char* method, const char*, const char*, std::size_t*, void**) {
    return static_cast<Impl*>(self)->Answer(connection, url, method);
  }

  // Exceptions must not reach the library, which is C: what is called here throws only when memory
  // ends.
  MHD_Result Answer(MHD_Connection* connection, absl::string_view url,
                    absl::string_view method) const noexcept {
    if (method != "GET" && method != "HEAD") {
      return Respond(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD\n");
    }
    if (url == "/metrics") {
      const absl::StatusOr<std::string> metrics = handlers_.metrics(AskerOf(connection));
      if (!metrics.ok()) return Refuse(connection, metrics.status());
      return Respond(connection, MHD_HTTP_OK, *metrics, "text/plain; version=0.0.4; charset=utf-8");
    }
    if (url == "/") return Respond(connection, MHD_HTTP_OK, kStatusPage, kHtml);
    if (url == "/healthz") return Respond(connection, MHD_HTTP_OK, "ok\n");
    if (url == "/readyz") {
      return handlers_.ready() ? Respond(connection, MHD_HTTP_OK, "ready\n")
                               : Respond(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "not ready\n");
    }
    return Respond(connection, MHD_HTTP_NOT_FOUND, "/, /metrics, /healthz, /readyz\n");
  }

  static MHD_Result Refuse(MHD_Connection* connection, const absl::Status& why) {
    return Respond(connection,
                   absl::IsUnauthenticated(why) ? MHD_HTTP_UNAUTHORIZED : MHD_HTTP_FORBIDDEN,
                   absl::StrCat(why.message(), "\n"));
  }

  static MHD_Result Respond(MHD_Connection* connection, unsigned status, const std::string& body,
                            const char* type = "text/plain") {
    // The library copies the body; to HEAD it sends the header only.
    MHD_Response* response = MHD_create_response_from_buffer(
        body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) return MHD_NO;
    MHD_Result queued = MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    if (queued == MHD_YES && absl::string_view(type) == kHtml) {
      // The page asks nobody but this server.
      queued = MHD_add_response_header(
          response, "Content-Security-Policy",
          "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src "
          "'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    }
    if (queued == MHD_YES && status == MHD_HTTP_UNAUTHORIZED) {
      queued = MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    }
    if (queued == MHD_YES) {  // One request a connection.
      queued = MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    }
    if (queued == MHD_YES) queued = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return queued;
  }

  HostPort address_;
  const Handlers handlers_;
  std::list<MHD_Connection*> connections_;
  MHD_Daemon* daemon_ = nullptr;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HostPort& address,
                                                              Handlers handlers) {
  auto impl = std::make_unique<Impl>(address, std::move(handlers));
  absl::Status status = impl->Start();
  if (!status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;
const HostPort& HttpServer::address() const { return impl_->address(); }

}  // namespace kvmill
