#include "client/c_api/watch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/queue.h"
#include "client/c_api/results.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::size_t kNameBytesMax = 4096;  // Whatever the daemon allows is less.
constexpr std::size_t kEpochBytes = 16;

static_assert(KVMILL_WATCHED_MOVED == static_cast<int>(WatchedEvent::Kind::kMoved) &&
              KVMILL_WATCHED_CLEARED == static_cast<int>(WatchedEvent::Kind::kCleared));

absl::StatusOr<EventStream::Options> WatchOptionsOf(const kvmill_watch_options* in) {
  kvmill_watch_options from;
  KVMILL_RETURN_IF_ERROR(ReadOptions("options", in, &from));
  EventStream::Options to;
  if (from.namespace_name != nullptr) {
    to.namespace_name.assign(from.namespace_name, strnlen(from.namespace_name, kNameBytesMax + 1));
    if (to.namespace_name.size() > kNameBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("namespace_name is longer than ", kNameBytesMax, " bytes"));
    }
  }
  to.snapshot = from.no_snapshot == 0;
  if (from.epoch == nullptr || from.epoch[0] == '\0') {
    if (from.sequence == 0) return to;
    return absl::InvalidArgumentError("a sequence without its epoch");
  }
  const absl::string_view hex(from.epoch, strnlen(from.epoch, 2 * kEpochBytes + 1));
  if (hex.size() != 2 * kEpochBytes || !std::all_of(hex.begin(), hex.end(), [](unsigned char c) {
        return absl::ascii_isxdigit(c);
      })) {
    return absl::InvalidArgumentError(
        absl::StrCat("an epoch has ", 2 * kEpochBytes, " hexadecimal digits"));
  }
  to.after = EventPosition{absl::HexStringToBytes(hex), from.sequence};
  return to;
}

}  // namespace

Watcher::Watcher(std::shared_ptr<Queue> queue, std::uint64_t tag,
                 std::unique_ptr<kvmill_result> end)
    : tag_(tag), queue_(std::move(queue)), end_(std::move(end)) {}

Watcher::~Watcher() = default;

void Watcher::Begin(std::unique_ptr<EventStream> stream) noexcept {
  {
    MutexLock lock(mu_);
    stream_ = std::move(stream);
  }
  Pull();
}

void Watcher::Close() {
  if (getpid() != pid_) {
    LeaveAlone();
    return;
  }
  std::unique_ptr<EventStream> stream;
  {
    MutexLock lock(mu_);
    stream = std::move(stream_);
  }
  stream.reset();  // Waits for its threads, which may be in Pull.
  MutexLock lock(mu_);
  End(absl::CancelledError("the watch was closed"));
}

// Without the lock, which nobody releases here; nor is there anybody else.
void Watcher::LeaveAlone() { static_cast<void>(stream_.release()); }

void Watcher::End(const absl::Status& status) {
  if (end_ == nullptr) return;
  end_->status = status;
  const std::shared_ptr<Queue> queue = std::move(queue_);
  queue->Finish(end_.release());
}

absl::Status Watcher::trouble() {
  MutexLock lock(mu_);
  return stream_ == nullptr ? absl::OkStatus() : stream_->trouble();
}

void Watcher::Pull() {
  MutexLock lock(mu_);
  if (is_out_ || stream_ == nullptr || end_ == nullptr) return;
  absl::StatusOr<EventBatch> next = stream_->Next(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(next.status())) return;  // The stream calls.
  if (!next.ok()) return End(next.status());
  is_out_ = true;
  auto news = std::make_unique<kvmill_result>();
  news->operation = KVMILL_WATCH_BATCH;
  news->tag = tag_;
  news->value = std::make_unique<WatchBatch>(*std::move(next), weak_from_this());
  queue_->Add(std::move(news));
}

void Watcher::Freed() {
  if (getpid() != pid_) return;
  {
    MutexLock lock(mu_);
    is_out_ = false;
  }
  Pull();
}

WatchBatch::WatchBatch(EventBatch from, std::weak_ptr<Watcher> of)
    : batch(std::move(from)), watcher_(std::move(of)) {
  if (batch.position.has_value()) epoch_hex = absl::BytesToHexString(batch.position->epoch);
  for (const WatchedEvent& event : batch.events) {
    std::unique_ptr<Space>& space = spaces[event.ns.get()];
    if (space != nullptr) continue;
    space = std::make_unique<Space>();
    space->of = event.ns;
    space->fingerprint_hex = ToHex(event.ns->fingerprint);
    space->as_c = {sizeof(kvmill_watched_namespace),
                   event.ns->name.c_str(),
                   space->fingerprint_hex.c_str(),
                   event.ns->model.c_str(),
                   event.ns->adapter_digest.c_str(),
                   event.ns->hash_scheme.c_str(),
                   event.ns->block_tokens};
  }
}

WatchBatch::~WatchBatch() {
  if (const std::shared_ptr<Watcher> watcher = watcher_.lock()) watcher->Freed();
}

}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

kvmill_code kvmill_watch_open(const kvmill_client_options* daemon,
                              const kvmill_watch_options* options, kvmill_queue* queue,
                              uint64_t tag, kvmill_watch** watch) {
  return Guard([&]() -> absl::Status {
    if (watch == nullptr) return Null("watch");
    *watch = nullptr;
    if (queue == nullptr) return Null("queue");
    KVMILL_RETURN_IF_ERROR(CheckProcess(queue->queue->pid()));
    kvmill_client_options from;
    KVMILL_RETURN_IF_ERROR(ReadClientOptions("daemon", daemon, &from));
    from.session_queue = nullptr;  // There is no session.
    KVMILL_ASSIGN_OR_RETURN(const Client::Options to, ClientOptionsOf(from));
    KVMILL_ASSIGN_OR_RETURN(EventStream::Options how, WatchOptionsOf(options));
    auto end = std::make_unique<kvmill_result>();
    end->operation = KVMILL_WATCH;
    end->tag = tag;
    const auto watcher = std::make_shared<Watcher>(queue->queue, tag, std::move(end));
    how.wake = [weak = std::weak_ptr<Watcher>(watcher)] {
      if (const std::shared_ptr<Watcher> woken = weak.lock()) woken->Pull();
    };
    auto made = std::make_unique<kvmill_watch>();
    made->watcher = watcher;
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<EventStream> stream,
                            EventStream::Open(to, std::move(how)));
    queue->queue->Begin();
    watcher->Begin(std::move(stream));
    *watch = made.release();
    return absl::OkStatus();
  });
}

kvmill_code kvmill_watch_close(kvmill_watch* watch) {
  return Guard([&]() -> absl::Status {
    if (watch == nullptr) return absl::OkStatus();
    watch->watcher->Close();
    delete watch;
    return absl::OkStatus();
  });
}

kvmill_code kvmill_watch_trouble(const kvmill_watch* watch, char* out, size_t out_bytes) {
  return Guard([&]() -> absl::Status {
    if (watch == nullptr) return Null("watch");
    if (out == nullptr) return Null("out");
    if (out_bytes == 0) return absl::OutOfRangeError("out_bytes 0");
    KVMILL_RETURN_IF_ERROR(CheckProcess(watch->watcher->pid()));
    const absl::Status trouble = watch->watcher->trouble();
    const std::string text = trouble.ok() ? "" : trouble.ToString();
    const std::size_t bytes = std::min(text.size(), out_bytes - 1);
    std::memcpy(out, text.data(), bytes);
    out[bytes] = '\0';
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_watch(const kvmill_result* result, kvmill_watch_batch* batch) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto* const value,
                            ValueOf<std::unique_ptr<WatchBatch>>(result, batch));
    const WatchBatch& from = **value;
    kvmill_watch_batch to = {};
    to.event_count = from.batch.events.size();
    if (from.batch.position.has_value()) {
      to.epoch = from.epoch_hex.c_str();
      to.sequence = from.batch.position->sequence;
    }
    to.snapshot_begin = from.batch.snapshot_begin ? 1 : 0;
    to.snapshot_end = from.batch.snapshot_end ? 1 : 0;
    return WriteStruct("batch", to, batch);
  });
}

kvmill_code kvmill_result_watched(const kvmill_result* result, size_t index,
                                  kvmill_watched_event* event) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto* const value,
                            ValueOf<std::unique_ptr<WatchBatch>>(result, event));
    const WatchBatch& batch = **value;
    if (index >= batch.batch.events.size()) {
      return OutOfRange("event", index, batch.batch.events.size());
    }
    const WatchedEvent& from = batch.batch.events[index];
    kvmill_watched_event to = {};
    to.key = {from.key.data(), from.key.size()};
    to.parent = {from.parent.data(), from.parent.size()};
    to.ns = &batch.spaces.at(from.ns.get())->as_c;
    to.what = static_cast<std::uint32_t>(from.kind);
    to.tier = static_cast<std::uint32_t>(from.tier);
    to.from_tier = static_cast<std::uint32_t>(from.from);
    to.token_count = from.token_count;
    return WriteStruct("event", to, event);
  });
}

}  // extern "C"
