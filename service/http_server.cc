#include "service/http_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvmill {
namespace {

using SteadyClock = std::chrono::steady_clock;

// A probe must be answered whatever else is connected: one connection's whole exchange has this
// long, and when there are too many the oldest one gives way.
constexpr std::chrono::seconds kExchangeMax{5};
constexpr std::size_t kConnectionsMax = 64;
constexpr std::size_t kRequestBytesMax = 16 << 10;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Connection {
  Descriptor socket;
  SteadyClock::time_point deadline;
  std::string request;
  std::string response;  // Not empty: the request was read.
  std::size_t sent = 0;
};

std::string Response(absl::string_view status, absl::string_view type, absl::string_view body,
                     bool with_body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n",
                      with_body ? body : absl::string_view());
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const HostPort& address, Handlers handlers)
      : address_(address), handlers_(std::move(handlers)) {}

  ~Impl() {
    if (!thread_.joinable()) return;
    const std::uint64_t one = 1;
    const ssize_t written = write(stop_.get(), &one, sizeof(one));
    static_cast<void>(written);  // It can only fail when the counter is already set.
    thread_.join();
  }

  absl::Status Start() {
    stop_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (stop_.get() < 0) return CannotListen(std::strerror(errno));
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int error =
        getaddrinfo(address_.host.c_str(), std::to_string(address_.port).c_str(), &hints, &found);
    if (error != 0) return CannotListen(gai_strerror(error));
    int bind_error = 0;
    for (const addrinfo* a = found; a != nullptr && listener_.get() < 0; a = a->ai_next) {
      Descriptor socket(
          ::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
      const int one = 1;
      if (socket.get() >= 0 &&
          setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
          bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.get(), 128) == 0) {
        listener_ = std::move(socket);
      } else {
        bind_error = errno;
      }
    }
    freeaddrinfo(found);
    if (listener_.get() < 0) return CannotListen(std::strerror(bind_error));
    sockaddr_storage bound{};
    socklen_t bytes = sizeof(bound);
    if (getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0) {
      return CannotListen(std::strerror(errno));
    }
    address_.port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                          : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

  const HostPort& address() const { return address_; }

 private:
  absl::Status CannotListen(absl::string_view why) const {
    return absl::UnavailableError(
        absl::StrCat("--metrics ", address_.ToString(), ": cannot listen there: ", why));
  }

  void Run() {
    bool accepts = true;  // Not for a moment after descriptors ran out.
    for (;;) {
      std::vector<pollfd> fds = {{stop_.get(), POLLIN, 0},
                                 {accepts ? listener_.get() : -1, POLLIN, 0}};
      for (const Connection& c : connections_) {
        const short events = c.response.empty() ? POLLIN : POLLOUT;
        fds.push_back({c.socket.get(), events, 0});
      }
      // A second is fine enough for the deadlines.
      const int count = poll(fds.data(), fds.size(), connections_.empty() && accepts ? -1 : 1000);
      if (count < 0 && errno != EINTR) return;
      if (count > 0 && fds[0].revents != 0) return;
      const SteadyClock::time_point now = SteadyClock::now();
      std::size_t i = 2;
      for (auto it = connections_.begin(); it != connections_.end(); ++i) {
        const bool over = (count > 0 && fds[i].revents != 0 && !Serve(*it)) || now >= it->deadline;
        it = over ? connections_.erase(it) : std::next(it);
      }
      const bool waiting = count > 0 && fds[1].revents != 0;
      accepts = !waiting || Accept(now);
    }
  }

  // False when there are no descriptors left.
  bool Accept(SteadyClock::time_point now) {
    for (;;) {
      Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.get() < 0) {
        return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
      }
      if (connections_.size() >= kConnectionsMax) connections_.pop_front();
      Connection& c = connections_.emplace_back();
      c.socket = std::move(socket);
      c.deadline = now + kExchangeMax;
    }
  }

  // False when the connection is done with.
  bool Serve(Connection& c) {
    if (c.response.empty()) {
      char buffer[4096];
      const ssize_t bytes = recv(c.socket.get(), buffer, sizeof(buffer), 0);
      if (bytes < 0) return errno == EAGAIN || errno == EINTR;
      if (bytes == 0) return false;
      c.request.append(buffer, static_cast<std::size_t>(bytes));
      if (c.request.find("\r\n\r\n") == std::string::npos) {
        if (c.request.size() <= kRequestBytesMax) return true;
        c.response = Response("431 Request Header Fields Too Large", "text/plain", "", false);
      } else {
        c.response = Answer(c.request.substr(0, c.request.find("\r\n")));
      }
    }
    while (c.sent < c.response.size()) {
      const ssize_t bytes = send(c.socket.get(), c.response.data() + c.sent,
                                 c.response.size() - c.sent, MSG_NOSIGNAL);
      if (bytes < 0) return errno == EAGAIN || errno == EINTR;
      c.sent += static_cast<std::size_t>(bytes);
    }
    // What the caller still sends would make close() reset the connection under the answer.
    shutdown(c.socket.get(), SHUT_WR);
    return false;
  }

  std::string Answer(absl::string_view request_line) const {
    const std::vector<absl::string_view> words = absl::StrSplit(request_line, ' ');
    if (words.size() != 3 || !absl::StartsWith(words[2], "HTTP/1.")) {
      return Response("400 Bad Request", "text/plain", "not an HTTP/1 request\n", true);
    }
    const bool head = words[0] == "HEAD";
    if (words[0] != "GET" && !head) {
      return Response("405 Method Not Allowed", "text/plain", "only GET and HEAD\n", true);
    }
    const absl::string_view path = words[1].substr(0, words[1].find('?'));
    if (path == "/metrics") {
      return Response("200 OK", "text/plain; version=0.0.4; charset=utf-8", handlers_.metrics(),
                      !head);
    }
    if (path == "/healthz") return Response("200 OK", "text/plain", "ok\n", !head);
    if (path == "/readyz") {
      return handlers_.ready()
                 ? Response("200 OK", "text/plain", "ready\n", !head)
                 : Response("503 Service Unavailable", "text/plain", "not ready\n", !head);
    }
    return Response("404 Not Found", "text/plain", "/metrics, /healthz, /readyz\n", !head);
  }

  HostPort address_;
  const Handlers handlers_;
  Descriptor stop_;  // eventfd.
  Descriptor listener_;
  std::list<Connection> connections_;  // Of the thread only; oldest first.
  std::thread thread_;
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
