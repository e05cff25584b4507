// Files of TLS as they were when they last fitted each other, for gRPC, which would take a
// certificate without its key and refuse everybody from then on.
#ifndef KVMILL_CLIENT_TLS_CHECKED_TLS_FILES_H_
#define KVMILL_CLIENT_TLS_CHECKED_TLS_FILES_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "client/tls/tls_checks.h"
#include "client/tls/tls_files.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Keeps copies in memory, which have paths, and looks at the files for as long as the process runs.
// A process has few sets of files: they are never given up. Thread-safe.
class CheckedTlsFiles {
 public:
  // How often a problem that stays is logged again.
  static constexpr std::chrono::minutes kRemindEvery{10};

  // `files` passed CheckTlsFiles, some time ago: until they fit the copies are empty, and
  // connections fail. Looks once.
  explicit CheckedTlsFiles(TlsFiles files);
  CheckedTlsFiles(const CheckedTlsFiles&) = delete;
  CheckedTlsFiles& operator=(const CheckedTlsFiles&) = delete;
  // Looks again every `period`, on a thread of its own. Once.
  void Watch(std::chrono::milliseconds period);

  // Of the copies. A certificate and its key are in one file, so that they change at once. Empty
  // where the files are.
  TlsFiles copies() const;
  // Unix time at which the certificate of the copies ends; 0 without one.
  std::int64_t certificate_end_seconds() const;
  // From now on only files that are good for it are taken.
  void UseAs(TlsUses uses);

  // Copies the files if they changed, and fit; else logs what is wrong, at most every kRemindEvery
  // as long as it is the same.
  void Look();

 private:
  // A file without a name in any folder. What has it open keeps what it was.
  class Copy {
   public:
    Copy();
    void Put(const std::string& text);
    std::string path() const;

   private:
    const int fd_;
  };

  void Problem(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const TlsFiles files_;
  Copy ca_, pair_;
  mutable Mutex mu_;
  TlsUses uses_ ABSL_GUARDED_BY(mu_);
  TlsTexts taken_ ABSL_GUARDED_BY(mu_);
  std::int64_t certificate_end_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  std::string problem_ ABSL_GUARDED_BY(mu_);  // Empty: none.
  std::chrono::steady_clock::time_point logged_at_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TLS_CHECKED_TLS_FILES_H_
