// Plain HTTP for probes, scrapers and people: /metrics, /healthz, /readyz, and / is a page that
// shows /metrics.
//
// libmicrohttpd on one thread, one request a connection. Slow, silent and many callers cannot keep
// a probe from its answer, nor the server from stopping: a silent connection is closed, and of many
// the oldest one gives way to a new one.
#ifndef KVMILL_SERVICE_HTTP_SERVER_H_
#define KVMILL_SERVICE_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/server_address.h"

namespace kvmill {

class HttpServer {
 public:
  struct Asker {
    std::string host;           // Numeric; empty when it is not known.
    bool is_local = false;      // An address of the loopback interface.
    std::string authorization;  // The header of that name; empty without.
  };
  struct Handlers {  // Called from the thread of the server.
    // UNAUTHENTICATED is answered with 401, PERMISSION_DENIED with 403, and the message.
    std::function<absl::StatusOr<std::string>(const Asker& asker)> metrics;
    std::function<bool()> ready;
  };

  // Listens and serves from a thread of its own. UNAVAILABLE naming the address when it cannot
  // listen.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HostPort& address,
                                                           Handlers handlers);
  ~HttpServer();

  // With the real port.
  const HostPort& address() const;

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_HTTP_SERVER_H_
