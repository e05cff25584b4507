// Reads the configuration again while the daemon runs: when it is asked (SIGHUP), and with
// --watch-config when the file or --tenants has other contents.
//
// All of it or nothing: what is read is checked as at the start, and a bad file changes nothing and
// is one error in the log. Options that cannot change while the daemon runs keep their values, and
// are named in one warning.
#ifndef KVMILL_SERVICE_RELOAD_H_
#define KVMILL_SERVICE_RELOAD_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "service/identities.h"
#include "service/loaded_config.h"
#include "service/running_config.h"
#include "storage/core/mutex.h"
#include "storage/tenant_quotas.h"

namespace kvmill {

class Reloader {
 public:
  // Contents that were the same twice, so far apart, are taken for whole: somebody may be writing.
  static constexpr std::chrono::milliseconds kWatchInterval{2000};

  // Takes over what of the configuration can change, who is who (of its tls_peers and tenants), and
  // what each may have; an error changes nothing. CANCELLED: the daemon ends, and there is nothing
  // to say.
  using Apply = std::function<absl::Status(const Config& config, Identities identities,
                                           const TenantQuotas& quotas)>;

  // Begins a thread of its own, which ends with the process: a file may hang (NFS), and nobody
  // waits for it. So everything here is shared with it.
  static std::shared_ptr<Reloader> Start(ConfigInputs inputs,
                                         std::shared_ptr<RunningConfig> running, Apply apply);

  // Thread-safe; returns at once. Asked again before it began: once is enough.
  void Ask();
  // When it returns no Apply runs, and none will.
  void Stop();

 private:
  Reloader(ConfigInputs inputs, std::shared_ptr<RunningConfig> running, Apply apply);
  void Run();
  // True: it was asked. False: a look at the files is due.
  bool Wait();
  bool LookChanged();
  std::string Contents() const;
  void Reload();
  absl::Status TryReload();

  const ConfigInputs inputs_;
  const std::shared_ptr<RunningConfig> running_;
  const Apply apply_;
  // Of the thread: digests of what the files had when they were read, and at the last look.
  std::string read_, seen_;
  Mutex mu_;
  CondVar changed_;
  bool asked_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool applying_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_RELOAD_H_
