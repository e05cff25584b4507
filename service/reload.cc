#include "service/reload.h"

#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/tenant_quotas.h"
#include "storage/core/log.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// A pipe or a terminal was read at the start, and has nothing more to say.
absl::Status CheckIsFile(const std::string& path) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_regular_file(path, ignored)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(path, ": is no file (any more)"));
}

std::string DigestOf(const std::string& path) {
  if (path.empty() || !CheckIsFile(path).ok()) return "none";
  const absl::StatusOr<std::string> text = ReadConfigFile(path);
  const Sha256Digest digest =
      Sha256(text.ok() ? *text : absl::StrCat("error ", text.status().message()));
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

bool ShowsInfo(absl::string_view level) {
  return level == "trace" || level == "debug" || level == "info";
}

std::string Change(const std::string& name, const Config& from, const Config& to) {
  const auto text = [&](const Config& config) {
    const std::string value = GetOption(name, config);
    return value.empty() ? std::string("none") : value;
  };
  return absl::StrCat(name, " ", text(from), " -> ", text(to));
}

}  // namespace

Reloader::Reloader(ConfigInputs inputs, std::shared_ptr<RunningConfig> running, Apply apply)
    : inputs_(std::move(inputs)), running_(std::move(running)), apply_(std::move(apply)) {}

std::shared_ptr<Reloader> Reloader::Start(ConfigInputs inputs,
                                          std::shared_ptr<RunningConfig> running, Apply apply) {
  std::shared_ptr<Reloader> reloader(
      new Reloader(std::move(inputs), std::move(running), std::move(apply)));
  // What changes from here on is seen.
  reloader->read_ = reloader->seen_ = reloader->Contents();
  std::thread([reloader] { reloader->Run(); }).detach();
  return reloader;
}

void Reloader::Ask() {
  MutexLock lock(mu_);
  asked_ = true;
  changed_.NotifyAll();
}

void Reloader::Stop() {
  MutexLock lock(mu_);
  stopped_ = true;
  changed_.NotifyAll();
  while (applying_) changed_.Wait(mu_);
}

bool Reloader::Wait() {
  const bool watch = running_->config().watch_config;
  MutexLock lock(mu_);
  while (!asked_ && !stopped_) {
    if (!watch) {
      changed_.Wait(mu_);
    } else if (!changed_.WaitFor(mu_, kWatchInterval)) {
      return false;
    }
  }
  return std::exchange(asked_, false);
}

void Reloader::Run() {
  for (;;) {
    const bool asked = Wait();
    {
      MutexLock lock(mu_);
      if (stopped_) return;
    }
    if (asked || LookChanged()) Reload();
  }
}

std::string Reloader::Contents() const {
  return absl::StrCat(DigestOf(inputs_.file), DigestOf(running_->config().tenants));
}

bool Reloader::LookChanged() {
  std::string now = Contents();
  const bool whole = now == seen_;
  seen_ = std::move(now);
  return whole && seen_ != read_;
}

void Reloader::Reload() {
  const std::string before = Contents();
  const absl::Status status = TryReload();
  // Of another --tenants than before nothing is known, so its first look is a change.
  read_ = before;
  seen_ = Contents();
  if (status.ok() || absl::IsCancelled(status)) return;
  running_->Refused(status);
  LogError(absl::StrCat("the configuration was read again and is refused, nothing changes: ",
                        status.message()));
}

absl::Status Reloader::TryReload() {
  KVMILL_RETURN_IF_ERROR(CheckIsFile(inputs_.file));
  KVMILL_ASSIGN_OR_RETURN(LoadedConfig wanted, LoadConfig(inputs_));
  KVMILL_RETURN_IF_ERROR(CheckIsFile(wanted.config.tenants));
  KVMILL_RETURN_IF_ERROR(CheckConfig(wanted.config));
  const Config running = running_->config();
  const Config effective = WithReloadable(running, wanted.config);
  const std::vector<std::string> kept = ChangedOptions(effective, wanted.config);
  if (!kept.empty()) {
    if (const absl::Status status = CheckConfig(effective); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("it does not go with what only another start changes (",
                                       absl::StrJoin(kept, ", "), "): ", status.message()));
    }
  }
  const std::string tenants = DigestOf(effective.tenants);
  KVMILL_ASSIGN_OR_RETURN(Identities identities, MakeIdentities(effective));
  KVMILL_ASSIGN_OR_RETURN(const TenantQuotas quotas, ReadTenantQuotas(effective.tenants));
  if (DigestOf(effective.tenants) != tenants) {
    return absl::AbortedError(
        absl::StrCat(effective.tenants, ": changed while it was read; ask again"));
  }
  {
    MutexLock lock(mu_);
    if (stopped_) return absl::CancelledError("the daemon ends");
    applying_ = true;
  }
  absl::Status status = apply_(effective, std::move(identities), quotas);
  if (status.ok()) status = SetLogFormat(effective.log_format);
  if (status.ok()) {
    std::vector<std::string> changes;
    for (const std::string& name : ChangedOptions(running, effective)) {
      changes.push_back(Change(name, running, effective));
    }
    const std::string line = absl::StrCat(
        "the configuration was read again: ",
        changes.empty() ? "no option changes" : absl::StrJoin(changes, ", "),
        effective.tenants.empty() ? ""
                                  : absl::StrCat("; who is who, and their quotas, are as ",
                                                 effective.tenants, " says now"));
    // At the level of before or the new one, whichever says more.
    const bool shown_before = ShowsInfo(running.log_level);
    if (shown_before) LogInfo(line);
    status = SetLogLevel(effective.log_level);
    if (!shown_before) LogInfo(line);
    if (!kept.empty()) {
      LogWarning(absl::StrCat("the configuration was read again, and only another start changes: ",
                              absl::StrJoin(kept, ", ")));
    }
    running_->Applied(effective, std::move(wanted));
  }
  MutexLock lock(mu_);
  applying_ = false;
  changed_.NotifyAll();
  return status;
}

}  // namespace kvmill
