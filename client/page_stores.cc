#include "client/page_stores.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

// Regions on their way to the daemon.
struct Sharing {
  Mutex mu;
  std::size_t left ABSL_GUARDED_BY(mu) = 0;
  absl::Status status ABSL_GUARDED_BY(mu);
  PageStores::StatusDone done;
};

// Of blocks that a flush gave up.
absl::Status Flushed() {
  return absl::CancelledError(
      "FlushPages came before all values of the block were ready: store it again when they are");
}

// A region in memory of a GPU.
DoorDeviceRegion MessageOf(const RegisteredMemory& memory, std::uint32_t index) {
  const EngineRegion& region = memory.geometry.regions[index];
  const EngineDeviceMemory& device = *region.device_memory;
  auto message = MakeDoorMessage<DoorDeviceRegion>();
  message.registration = memory.registration;
  message.region = index;
  message.offset_bytes = device.offset_bytes;
  message.bytes = region.bytes;
  message.allocation_bytes = device.allocation_bytes;
  std::memcpy(message.handle.data(), device.handle.data(), sizeof(message.handle));
  std::memcpy(message.device.data(), device.device.data(), sizeof(message.device));
  return message;
}

}  // namespace

void PageStores::Register(RegisteredMemoryPtr memory, Deadline deadline, StatusDone done) {
  std::vector<std::uint32_t> shared;
  for (std::uint32_t i = 0; i < memory->geometry.regions.size(); ++i) {
    const EngineRegionKind kind = KindOf(memory->geometry.regions[i]);
    if (kind == EngineRegionKind::kMemfd || kind == EngineRegionKind::kDeviceIpc) {
      shared.push_back(i);
    }
  }
  const auto keep = [this, memory] {
    MutexLock lock(mu_);
    memories_[memory->registration] = memory;
  };
  DoorClient* const door = connection_.door();
  if (shared.empty() || door == nullptr) {
    keep();
    return done(absl::OkStatus());
  }
  const auto sharing = std::make_shared<Sharing>();  // Of every answer.
  sharing->left = shared.size();
  sharing->done = [keep, done = std::move(done)](const absl::Status& status) {
    if (status.ok()) keep();
    done(status);
  };
  for (const std::uint32_t i : shared) {
    const EngineRegion& region = memory->geometry.regions[i];
    const auto taken = [sharing, i](const absl::Status& status) {
      absl::Status all;
      {
        MutexLock lock(sharing->mu);
        if (!status.ok() && sharing->status.ok()) {
          sharing->status =
              absl::Status(status.code(), absl::StrCat("region ", i, ": ", status.message()));
        }
        if (--sharing->left > 0) return;
        all = sharing->status;
      }
      sharing->done(all);
    };
    if (region.device_memory.has_value()) {
      door->SendDeviceRegion(memory->session->pass, MessageOf(*memory, i), deadline, taken);
      continue;
    }
    auto message = MakeDoorMessage<DoorRegion>();
    message.registration = memory->registration;
    message.region = i;
    message.kind = static_cast<std::uint8_t>(DoorRegionKind::kMemfd);
    message.offset_bytes = region.fd_offset_bytes;
    message.bytes = region.bytes;
    door->SendRegion(memory->session->pass, message, region.fd, deadline, taken);
  }
}

void PageStores::Unregistering(std::uint64_t registration) {
  MutexLock lock(mu_);
  const auto it = memories_.find(registration);
  if (it != memories_.end()) it->second->unregistering.store(true);
}

void PageStores::Unregistered(std::uint64_t registration) {
  std::vector<StreamPtr> streams;
  {
    MutexLock lock(mu_);
    memories_.erase(registration);
    for (const auto& [number, stream] : streams_) {
      if (stream->registration() == registration) streams.push_back(stream);
    }
  }
  // Their values may never become ready: nobody would answer these calls.
  for (const StreamPtr& stream : streams) {
    stream->GiveUpUnready(stream->Find({}), MemoryUnregistered());
  }
}

void PageStores::Start(const ClientNamespace& ns, std::uint64_t registration,
                       const RegisteredMemoryPtr& meant, absl::Span<const PageBlock> blocks,
                       const PageStoreOptions& options, Deadline deadline,
                       PageStoreStream::Done done) {
  StreamPtr stream;
  const absl::Status status = [&]() -> absl::Status {
    if (connection_.door() == nullptr) {
      return absl::FailedPreconditionError(
          "pages are read in place by a daemon of the same node, through its socket; Store reads "
          "them in this process and sends them");
    }
    MutexLock lock(mu_);
    if (stopping_) return absl::CancelledError("the client is being destroyed");
    const auto it = memories_.find(registration);
    if (it == memories_.end() || (meant != nullptr && it->second != meant)) {
      return absl::NotFoundError(
          absl::StrCat("registration ", registration, " is not one of this client"));
    }
    const RegisteredMemoryPtr memory = it->second;
    if (memory->session->ended.load(std::memory_order_acquire)) {
      memories_.erase(it);
      return absl::AbortedError("the session ended: register the memory again");
    }
    if (memory->fingerprint != ns.fingerprint) {
      return absl::InvalidArgumentError(
          absl::StrCat("registration ", registration, " is of another namespace"));
    }
    absl::Status fits = CheckPageBlocks(ns.spec, memory->geometry, blocks);
    if (!fits.ok()) return fits;
    const std::uint64_t number = next_number_++;
    stream = std::make_shared<PageStoreStream>(
        connection_, session_, ns, memory, number, blocks, options, [this] { Sweep(); },
        std::move(done));
    streams_.emplace(number, stream);
    return absl::OkStatus();
  }();
  if (!status.ok()) return done(status);
  stream->Start(deadline);
}

std::vector<PageStores::StreamPtr> PageStores::StreamsOf(std::uint64_t request) {
  std::vector<StreamPtr> found;
  MutexLock lock(mu_);
  for (const auto& [number, stream] : streams_) {
    if (stream->request() == request) found.push_back(stream);
  }
  return found;
}

void PageStores::Ready(std::uint64_t request, std::uint32_t layers) {
  for (const StreamPtr& stream : StreamsOf(request)) stream->Ready(layers);
}

void PageStores::FlushRequest(std::uint64_t request, Deadline deadline, StatusDone done) {
  Wait wait;
  wait.deadline = deadline;
  wait.done = std::move(done);
  for (StreamPtr& stream : StreamsOf(request)) {
    std::vector<std::uint32_t> blocks = stream->Find({});
    stream->GiveUpUnready(blocks, Flushed());
    wait.parts.push_back({std::move(stream), std::move(blocks)});
  }
  Add(std::move(wait));
}

void PageStores::FlushBlocks(absl::Span<const BlockKey> keys, Deadline deadline, StatusDone done) {
  Wait wait;
  wait.deadline = deadline;
  wait.done = std::move(done);
  std::vector<StreamPtr> all;
  {
    MutexLock lock(mu_);
    for (const auto& [number, stream] : streams_) all.push_back(stream);
  }
  for (StreamPtr& stream : all) {
    if (keys.empty()) break;  // None; to Find it would be all.
    std::vector<std::uint32_t> blocks = stream->Find(keys);
    if (blocks.empty()) continue;
    stream->GiveUpUnready(blocks, Flushed());
    wait.parts.push_back({std::move(stream), std::move(blocks)});
  }
  Add(std::move(wait));
}

void PageStores::Cancel(std::uint64_t request, Deadline deadline, StatusDone done) {
  Wait wait;
  wait.whole = true;
  wait.deadline = deadline;
  wait.done = std::move(done);
  for (StreamPtr& stream : StreamsOf(request)) {
    stream->Cancel(PageStoreStream::CancelAs::kBlocks,
                   absl::CancelledError("CancelPages came before the block was stored: store it "
                                        "again if it is wanted after all"));
    wait.parts.push_back({std::move(stream), {}});
  }
  Add(std::move(wait));
}

void PageStores::CancelStanding(std::uint64_t standing, const RegisteredMemoryPtr& now,
                                Deadline deadline, StatusDone done) {
  Wait wait;
  wait.whole = true;
  wait.deadline = deadline;
  wait.done = std::move(done);
  {
    MutexLock lock(mu_);
    for (const auto& [number, stream] : streams_) {
      if (stream->memory()->standing == standing && stream->memory() != now) {
        wait.parts.push_back({stream, {}});
      }
    }
  }
  for (const Wait::Part& part : wait.parts) {
    part.stream->Cancel(PageStoreStream::CancelAs::kBlocks, MemoryUnregistered());
  }
  Add(std::move(wait));
}

void PageStores::Add(Wait wait) {
  std::vector<StreamPtr> streams;
  for (const Wait::Part& part : wait.parts) streams.push_back(part.stream);
  const Deadline deadline = wait.deadline;
  {
    MutexLock lock(mu_);
    waits_.push_back(std::move(wait));
    SetTimer(deadline);
  }
  for (const StreamPtr& stream : streams) stream->AskUntil(deadline);
  Sweep();
}

void PageStores::Sweep() {
  std::vector<std::pair<StatusDone, absl::Status>> answers;
  {
    MutexLock lock(mu_);
    for (auto it = streams_.begin(); it != streams_.end();) {
      it = it->second->free() ? streams_.erase(it) : std::next(it);
    }
    const auto now = std::chrono::system_clock::now();
    for (auto it = waits_.begin(); it != waits_.end();) {
      const bool rest = std::all_of(it->parts.begin(), it->parts.end(), [&](const auto& part) {
        return it->whole ? part.stream->free() : part.stream->AtRest(part.blocks);
      });
      if (!rest && now < it->deadline) {
        ++it;
        continue;
      }
      answers.emplace_back(std::move(it->done),
                           rest ? absl::OkStatus()
                                : absl::DeadlineExceededError(
                                      "the daemon may still read the pages: ask again before they "
                                      "get another use"));
      it = waits_.erase(it);
    }
    for (const Wait& wait : waits_) SetTimer(wait.deadline);
    changed_.NotifyAll();
  }
  for (const auto& [done, status] : answers) done(status);
}

void PageStores::SetTimer(Deadline when) {
  if (timer_set_ && timer_at_ <= when) return;
  timer_set_ = true;
  timer_at_ = when;
  const auto left = std::max(when - std::chrono::system_clock::now(), Deadline::duration(0));
  connection_.PostAt(std::chrono::steady_clock::now() + left + std::chrono::milliseconds(1),
                     [this] {
                       {
                         MutexLock lock(mu_);
                         if (timer_at_ <= std::chrono::system_clock::now()) timer_set_ = false;
                       }
                       Sweep();
                     });
}

void PageStores::Stop(std::chrono::milliseconds wait) {
  const auto give_up = std::chrono::steady_clock::now() + wait;
  std::vector<StreamPtr> streams;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    for (const auto& [number, stream] : streams_) streams.push_back(stream);
  }
  for (const StreamPtr& stream : streams) {
    stream->Cancel(PageStoreStream::CancelAs::kWholeCall,
                   absl::CancelledError("the client is being destroyed"));
  }
  Sweep();
  std::vector<Wait> waits;
  {
    MutexLock lock(mu_);
    while (!streams_.empty() && std::chrono::steady_clock::now() < give_up) {
      changed_.WaitFor(mu_, std::chrono::milliseconds(10));
    }
    waits.swap(waits_);
  }
  for (const Wait& left : waits) left.done(absl::CancelledError("the client is being destroyed"));
}

}  // namespace kvmill
