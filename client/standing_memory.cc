#include "client/standing_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Between two attempts to register the same memory: with a daemon that is away, and with one that
// refuses it.
constexpr milliseconds kPauseMin{20};
constexpr milliseconds kAwayPauseMax{500};
constexpr milliseconds kRefusedPauseMax{5000};

}  // namespace

bool StandingMemory::Lives(const Entry& entry) {
  return entry.memory != nullptr && !entry.memory->session->ended.load(std::memory_order_acquire);
}

bool StandingMemory::Due(Entry& entry) {
  if (entry.removed || entry.busy || Lives(entry)) return false;
  if (steady_clock::now() < entry.not_before) {
    check_.store(true);
    return false;
  }
  entry.busy = true;
  return true;
}

StandingMemory::Deadline StandingMemory::NewDeadline() const {
  return std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout_);
}

void StandingMemory::Add(const ClientNamespace& ns, const EngineGeometry& geometry,
                         Deadline deadline, Client::Done<std::uint64_t> done) {
  const auto entry = std::make_shared<Entry>();
  entry->ns = ns;
  entry->geometry = geometry;
  for (std::size_t i = 0; i < geometry.regions.size(); ++i) {
    EngineRegion& region = entry->geometry.regions[i];
    if (region.fd < 0) continue;
    OwnedFd mine(fcntl(region.fd, F_DUPFD_CLOEXEC, 0));
    if (!mine.valid()) return done(absl::ErrnoToStatus(errno, absl::StrCat("region ", i, ": fd")));
    region.fd = mine.get();
    entry->descriptors.push_back(std::move(mine));
  }
  {
    MutexLock lock(mu_);
    entry->number = next_number_++;
    entry->busy = true;
    entries_.emplace(entry->number, entry);
  }
  RegisterNow(entry, deadline, [this, entry, done = std::move(done)](const absl::Status& status) {
    if (status.ok() || away_.IsAway(status)) return done(entry->number);
    Forget(entry->number);
    done(status);
  });
}

void StandingMemory::RegisterNow(const EntryPtr& entry, Deadline deadline,
                                 std::function<void(absl::Status)> done) {
  const auto memory = std::make_shared<RegisteredMemory>();
  memory->fingerprint = entry->ns.fingerprint;
  memory->geometry = entry->geometry;
  memory->standing = entry->number;
  register_(entry->ns, memory, deadline,
            [this, entry, memory, done = std::move(done)](const absl::Status& status) {
              const bool refused = !status.ok() && !away_.IsAway(status);
              std::vector<std::function<void()>> when_idle;
              bool tell = false;
              {
                MutexLock lock(mu_);
                entry->busy = false;
                when_idle.swap(entry->when_idle);
                if (status.ok()) {
                  entry->memory = memory;
                  entry->pause = milliseconds(0);
                  entry->said.clear();
                } else {
                  entry->pause = std::clamp(2 * entry->pause, kPauseMin,
                                            refused ? kRefusedPauseMax : kAwayPauseMax);
                  entry->not_before = steady_clock::now() + entry->pause;
                  check_.store(true);
                  tell = refused && !absl::IsCancelled(status) && entry->said != status.message();
                  if (tell) entry->said = std::string(status.message());
                }
              }
              if (tell && done == nullptr) {
                LogWarning(
                    absl::StrCat("the daemon does not take the engine's memory again, so "
                                 "nothing is stored from it: ",
                                 status.message()));
              }
              if (done != nullptr) done(status);
              for (const auto& next : when_idle) next();
            });
}

absl::StatusOr<RegisteredMemoryPtr> StandingMemory::Find(std::uint64_t number) {
  EntryPtr due;
  {
    MutexLock lock(mu_);
    const auto it = entries_.find(number);
    if (it == entries_.end() || it->second->removed) {
      return absl::NotFoundError(
          absl::StrCat("registration ", number, " is not one of this client"));
    }
    if (Lives(*it->second)) return it->second->memory;
    if (Due(*it->second)) due = it->second;
  }
  if (due != nullptr) RegisterNow(due, NewDeadline(), nullptr);
  return absl::UnavailableError("the engine's memory is not registered with the daemon yet");
}

void StandingMemory::Lost(const RegisteredMemoryPtr& memory) {
  MutexLock lock(mu_);
  const auto it = entries_.find(memory->standing);
  if (it == entries_.end() || it->second->memory != memory) return;
  it->second->memory = nullptr;
  check_.store(true);
}

void StandingMemory::Restore() {
  if (!check_.load(std::memory_order_relaxed) || !check_.exchange(false)) return;
  std::vector<EntryPtr> due;
  {
    MutexLock lock(mu_);
    for (const auto& [number, entry] : entries_) {
      if (Due(*entry)) due.push_back(entry);
    }
  }
  for (const EntryPtr& entry : due) RegisterNow(entry, NewDeadline(), nullptr);
}

void StandingMemory::Remove(std::uint64_t number,
                            std::function<void(absl::StatusOr<RegisteredMemoryPtr>)> done) {
  EntryPtr entry;
  {
    MutexLock lock(mu_);
    const auto it = entries_.find(number);
    if (it != entries_.end()) entry = it->second;
    if (entry != nullptr) {
      entry->removed = true;
      if (entry->busy) {
        entry->when_idle.emplace_back(
            [this, number, done = std::move(done)] { Remove(number, done); });
        return;
      }
    }
  }
  if (entry == nullptr) {
    return done(
        absl::NotFoundError(absl::StrCat("registration ", number, " is not one of this client")));
  }
  RegisteredMemoryPtr memory;
  {
    MutexLock lock(mu_);
    if (Lives(*entry)) memory = entry->memory;
  }
  done(std::move(memory));
}

void StandingMemory::Forget(std::uint64_t number) {
  MutexLock lock(mu_);
  entries_.erase(number);
}

}  // namespace kvmill
