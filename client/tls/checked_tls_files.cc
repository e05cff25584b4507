#include "client/tls/checked_tls_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

int NewMemory() {
  const int fd = memfd_create("kvmill-tls", MFD_CLOEXEC);
  KVMILL_CHECK(fd >= 0);  // As any other allocation.
  return fd;
}

}  // namespace

CheckedTlsFiles::Copy::Copy() : fd_(NewMemory()) {}

// Another file gets the number of the last one, in one step: whoever opens the path has the whole
// of one of them.
void CheckedTlsFiles::Copy::Put(const std::string& text) {
  const int fd = NewMemory();
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = write(fd, text.data() + done, text.size() - done);
    KVMILL_CHECK(written > 0);
    done += static_cast<std::size_t>(written);
  }
  KVMILL_CHECK(dup3(fd, fd_, O_CLOEXEC) == fd_);
  close(fd);
}

std::string CheckedTlsFiles::Copy::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

CheckedTlsFiles::CheckedTlsFiles(TlsFiles files) : files_(std::move(files)) { Look(); }

void CheckedTlsFiles::Watch(std::chrono::milliseconds period) {
  std::thread([this, period] {
    for (;;) {
      std::this_thread::sleep_for(period);
      Look();
    }
  }).detach();
}

TlsFiles CheckedTlsFiles::copies() const {
  TlsFiles copies = files_;
  copies.ca = ca_.path();
  if (!files_.certificate.empty()) copies.certificate = copies.key = pair_.path();
  return copies;
}

std::int64_t CheckedTlsFiles::certificate_end_seconds() const {
  MutexLock lock(mu_);
  return certificate_end_seconds_;
}

void CheckedTlsFiles::UseAs(TlsUses uses) {
  MutexLock lock(mu_);
  uses_.server |= uses.server;
  uses_.client |= uses.client;
}

void CheckedTlsFiles::Look() {
  const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(files_);
  MutexLock lock(mu_);
  if (!texts.ok()) return Problem(texts.status());
  if (*texts == taken_) {
    problem_.clear();  // Put back.
    return;
  }
  absl::Status fit = CheckTlsTexts(files_, *texts);
  if (fit.ok()) fit = CheckTlsUses(files_, *texts, uses_);
  if (!fit.ok()) return Problem(fit);
  const bool first = taken_.ca.empty();
  taken_ = *texts;
  ca_.Put(taken_.ca);
  pair_.Put(absl::StrCat(taken_.key, "\n", taken_.certificate));
  if (!files_.certificate.empty()) {
    certificate_end_seconds_ =
        CertificateEndSeconds(files_.certificate, taken_.certificate).value_or(0);
  }
  problem_.clear();
  if (first) return;
  LogInfo(absl::StrCat("TLS: the files changed, and are used from now on: ", files_.ca,
                       files_.certificate.empty() ? "" : absl::StrCat(", ", files_.certificate)));
}

void CheckedTlsFiles::Problem(const absl::Status& status) {
  const auto now = std::chrono::steady_clock::now();
  const std::string problem(status.message());
  if (problem == problem_ && now - logged_at_ < kRemindEvery) return;
  problem_ = problem;
  logged_at_ = now;
  LogWarning(absl::StrCat(
      "TLS: ", problem,
      taken_.ca.empty() ? "; no connection can be made" : "; what was read before stays in use"));
}

}  // namespace kvmill
