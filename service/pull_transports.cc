#include "service/pull_transports.h"

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"

namespace kvmill {

void PullTransports::Came(const std::string& node, const std::string& transport,
                          std::uint64_t bytes) {
  {
    MutexLock lock(mu_);
    const std::string& name = transport.empty() ? "unknown" : transport;
    const bool room = now_.bytes.size() < kNamesMax || now_.bytes.count(name) > 0;
    now_.bytes[room ? name : "other"] += bytes;
    if (transport.empty()) return;
    const auto known = now_.last.find(node);
    if (known != now_.last.end() && known->second == transport) return;
    if (known == now_.last.end() && now_.last.size() >= kNodesMax)
      now_.last.erase(now_.last.begin());
    now_.last[node] = transport;
  }
  LogInfo(absl::StrCat("cluster: blocks of node \"", node, "\" come by ", transport));
}

PullTransports::Snapshot PullTransports::snapshot() const {
  MutexLock lock(mu_);
  return now_;
}

}  // namespace kvmill
