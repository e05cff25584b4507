#include "service/http_server.h"

#include <httplib.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

constexpr std::size_t kThreads = 4;
constexpr std::size_t kRequestBytesMax = 64 << 10;

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const HostPort& address, Handlers handlers)
      : address_(address), handlers_(std::move(handlers)) {
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    // A slow or silent client holds one of few threads: not for long.
    server_.set_read_timeout(5, 0);
    server_.set_write_timeout(5, 0);
    server_.set_keep_alive_timeout(2);
    server_.set_payload_max_length(kRequestBytesMax);
    server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(handlers_.metrics(), "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.Get("/healthz", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("ok\n", "text/plain");
    });
    server_.Get("/readyz", [this](const httplib::Request&, httplib::Response& response) {
      const bool ready = handlers_.ready();
      response.status = ready ? 200 : 503;
      response.set_content(ready ? "ready\n" : "not ready\n", "text/plain");
    });
  }

  ~Impl() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Start() {
    const int port =
        address_.port == 0
            ? server_.bind_to_any_port(address_.host.c_str())
            : (server_.bind_to_port(address_.host.c_str(), address_.port) ? int{address_.port}
                                                                          : -1);
    if (port <= 0) {
      return absl::UnavailableError(
          absl::StrCat("--metrics ", address_.ToString(), ": cannot listen there"));
    }
    address_.port = static_cast<std::uint16_t>(port);
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    // stop() before the loop runs would be lost.
    while (!server_.is_running()) std::this_thread::yield();
    return absl::OkStatus();
  }

  const HostPort& address() const { return address_; }

 private:
  HostPort address_;
  Handlers handlers_;
  httplib::Server server_;
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
