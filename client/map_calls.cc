#include "client/map_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/unary_call.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// A release has no one who waits for it; the leases end by themselves if it does not arrive.
constexpr std::chrono::seconds kReleaseTimeout{5};

std::int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Ascending leases as ranges.
template <typename Ranges>
void AddRanges(const std::vector<std::uint64_t>& leases, Ranges* ranges) {
  for (std::size_t i = 0; i < leases.size();) {
    std::size_t end = i + 1;
    while (end < leases.size() && leases[end] == leases[i] + (end - i)) ++end;
    v1::LeaseRange* range = ranges->Add();
    range->set_first(leases[i]);
    range->set_count(static_cast<std::uint32_t>(end - i));
    i = end;
  }
}

std::vector<std::uint64_t> LeasesOf(const MappedBlocks::Content& content) {
  std::vector<std::uint64_t> leases;
  for (const MappedBlocks::Content::Entry& entry : content.entries) {
    if (entry.status.ok()) leases.push_back(entry.lease);
  }
  return leases;
}

}  // namespace

// One Map on its way.
struct MapCalls::Call {
  ClientNamespace ns;
  std::vector<BlockKey> keys;
  std::uint32_t lease_ms = 0;
  PageMemory memory = PageMemory::kHost;
  Elsewhere elsewhere;
  Deadline deadline;
  Mapped done;
  SessionPtr session;
  std::int64_t sent_nanos = 0;
  MapReplyContent content;
  // One for each arena of the content; null when that is on the GPU and could not be had.
  std::vector<ArenaMappingPtr> mappings;
  std::vector<absl::Status> arena_status;  // Why.

  Mutex mu;
  std::size_t arenas_left ABSL_GUARDED_BY(mu) = 0;
  absl::Status failed ABSL_GUARDED_BY(mu);
};

void MapCalls::Map(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                   std::uint32_t lease_ms, PageMemory memory, const Elsewhere& elsewhere,
                   Deadline deadline, Mapped done) {
  if (connection_.door() == nullptr) {
    done(absl::FailedPreconditionError(
        "map is for clients on the daemon's node: use its socket, or fetch"));
    return;
  }
  if (memory != PageMemory::kHost && device_ == nullptr) {
    done(absl::FailedPreconditionError(
        "blocks on the GPU are mapped for a device, and this client was given none: set "
        "Client::Options::device, or map host memory"));
    return;
  }
  auto call = std::make_shared<Call>();
  call->ns = ns;
  call->keys.assign(keys.begin(), keys.end());
  call->lease_ms = lease_ms;
  call->memory = memory;
  call->elsewhere = elsewhere;
  call->deadline = deadline;
  call->done = std::move(done);
  Send(call, false);
}

void MapCalls::Send(const std::shared_ptr<Call>& call, bool again) {
  session_.Ensure(call->deadline, [this, call, again](absl::StatusOr<SessionPtr> session) {
    if (!session.ok()) {
      call->done(session.status());
      return;
    }
    call->session = *session;
    v1::MapRequest request;
    request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(call->ns.fingerprint)));
    for (const BlockKey& key : call->keys) request.add_keys(std::string(key.view()));
    request.set_session_id(call->session->id);
    request.set_lease_ms(call->lease_ms);
    request.set_memory(ToProto(call->memory));
    request.set_loads_generations(true);
    if (call->elsewhere != Elsewhere()) ToProto(call->elsewhere, request.mutable_elsewhere());
    // The lease is counted from here: the daemon can only have begun later.
    call->sent_nanos = NowNanos();
    StartUnaryCall<v1::MapReply, MapReplyContent>(
        connection_, call->deadline,
        [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
          return channel.cache->PrepareAsyncMap(context, request, queue);
        },
        [call](const v1::MapReply& reply) {
          return ReadMapReply(reply, call->ns.spec, call->keys.size());
        },
        [this, call, again](absl::StatusOr<MapReplyContent> content) {
          if (absl::IsAborted(content.status()) && !again) {
            session_.Ended(call->session);
            Send(call, true);
          } else if (!content.ok()) {
            call->done(content.status());
          } else {
            call->content = *std::move(content);
            GetArenas(call);
          }
        });
  });
}

void MapCalls::GetArenas(const std::shared_ptr<Call>& call) {
  const MapReplyContent& content = call->content;
  call->mappings.resize(content.arenas.size());
  call->arena_status.resize(content.arenas.size());
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < content.arenas.size(); ++i) {
    call->mappings[i] = mappings_.Find(content.arenas[i].id);
    if (call->mappings[i] == nullptr) missing.push_back(i);
  }
  if (missing.empty()) {
    Complete(call);
    return;
  }
  {
    MutexLock lock(call->mu);
    call->arenas_left = missing.size();
  }
  for (const std::size_t i : missing) {
    const MappedArenaInfo& arena = content.arenas[i];
    auto request = MakeDoorMessage<DoorArenaRequest>();
    request.arena = arena.id.arena;
    request.arena_epoch = arena.id.epoch;
    request.tier = static_cast<std::uint8_t>(arena.id.tier);
    for (std::size_t b = 0; b < content.blocks.size() && request.lease == 0; ++b) {
      const MapReplyBlock& block = content.blocks[b];
      if (!block.status.ok()) continue;
      for (std::size_t r = block.first_run; r < block.first_run + block.run_count; ++r) {
        if (content.runs[r].arena_index == i) request.lease = block.lease;
      }
    }
    connection_.door()->RequestArena(
        call->session->pass, request, call->deadline,
        [this, call, i](absl::StatusOr<DoorClient::ArenaMemory> memory) {
          const MappedArenaInfo& got = call->content.arenas[i];
          absl::StatusOr<ArenaMappingPtr> mapping =
              memory.ok() ? MappingOf(*memory, got)
                          : absl::StatusOr<ArenaMappingPtr>(memory.status());
          bool last = false;
          {
            MutexLock lock(call->mu);
            if (mapping.ok()) {
              call->mappings[i] = mappings_.Add(got.id, *std::move(mapping));
            } else if (memory.ok() && got.id.tier == Tier::kGpu) {
              // The device's refusal: of its blocks, and not of those elsewhere.
              call->arena_status[i] = mapping.status();
            } else if (call->failed.ok()) {
              call->failed = mapping.status();
            }
            last = --call->arenas_left == 0;
          }
          if (last) Complete(call);
        });
  }
}

absl::StatusOr<ArenaMappingPtr> MapCalls::MappingOf(const DoorClient::ArenaMemory& memory,
                                                    const MappedArenaInfo& arena) {
  if (arena.id.tier != Tier::kGpu) return ArenaMapping::Create(memory, arena);
  KVMILL_ASSIGN_OR_RETURN(std::shared_ptr<DeviceReader> reader, Reader());
  return ArenaMapping::CreateOnDevice(memory, arena, std::move(reader));
}

absl::StatusOr<std::shared_ptr<DeviceReader>> MapCalls::Reader() {
  if (device_ == nullptr) return absl::InternalError("GPU memory that was not asked for");
  MutexLock lock(reader_mu_);
  if (reader_ == nullptr) {
    KVMILL_ASSIGN_OR_RETURN(reader_, DeviceReader::Create(*device_));
  }
  return reader_;
}

// Blocks with pages that this process has not got, or not where it wants them, are none.
std::vector<std::uint64_t> MapCalls::GiveUpUnreachable(Call& call) {
  std::vector<std::uint64_t> leases;
  MapReplyContent& content = call.content;
  for (MapReplyBlock& block : content.blocks) {
    const std::size_t end = block.first_run + block.run_count;
    if (!block.status.ok()) continue;
    for (std::size_t r = block.first_run; r < end && block.status.ok(); ++r) {
      const std::uint32_t arena = content.runs[r].arena_index;
      block.status = call.arena_status[arena];
      if (call.memory == PageMemory::kGpu && content.arenas[arena].id.tier != Tier::kGpu) {
        block.status =
            absl::FailedPreconditionError("the daemon is of a version that maps host memory only");
      }
    }
    if (!block.status.ok()) leases.push_back(block.lease);
  }
  return leases;
}

void MapCalls::Complete(const std::shared_ptr<Call>& call) {
  absl::Status failed;
  {
    MutexLock lock(call->mu);
    failed = call->failed;
  }
  MapReplyContent& from = call->content;
  if (!failed.ok()) {
    std::vector<std::uint64_t> leases;
    for (const MapReplyBlock& block : from.blocks) {
      if (block.status.ok()) leases.push_back(block.lease);
    }
    Release(call->session, leases);
    call->done(failed);
    return;
  }
  Release(call->session, GiveUpUnreachable(*call));
  auto content = std::make_unique<MappedBlocks::Content>();
  content->ns = std::move(call->ns);
  content->keys = std::move(call->keys);
  content->session = call->session;
  content->owner = owner_;
  content->deadline_nanos.store(call->sent_nanos + std::int64_t{call->lease_ms} * 1'000'000,
                                std::memory_order_release);
  const std::size_t groups = content->ns.spec.groups.size();
  content->blocks.resize(content->keys.size());
  content->entries.resize(from.blocks.size());
  for (std::size_t i = 0; i < from.blocks.size(); ++i) {
    MapReplyBlock& block = from.blocks[i];
    MappedBlocks::Content::Entry& entry = content->entries[i];
    MappedBlocks::Content::Block& whole = content->blocks[i / groups];
    if (whole.status.ok() && !block.status.ok()) whole.status = block.status;
    if (block.status.ok()) {
      whole.tier = std::max(whole.tier, block.tier);
      whole.token_count = std::max(whole.token_count, block.token_count);
    }
    entry.status = std::move(block.status);
    entry.tier = block.tier;
    entry.token_count = block.token_count;
    entry.lease = block.lease;
    entry.first_run = block.first_run;
    entry.run_count = block.run_count;
    entry.first_page = block.first_page;
  }
  content->runs = std::move(from.runs);
  content->generations = std::make_unique<std::atomic<std::uint64_t>[]>(from.page_count);
  content->mappings = std::move(call->mappings);
  call->done(std::move(content));
}

void MapCalls::Renew(MappedBlocks::Content& content, std::uint32_t lease_ms, Deadline deadline,
                     std::function<void(absl::Status)> done) {
  absl::Status live = content.CheckProcess();
  if (live.ok()) live = content.CheckLeases();
  if (!live.ok()) {
    done(std::move(live));
    return;
  }
  if (!content.away.ok()) {  // No daemon knows of it.
    content.deadline_nanos.store(NowNanos() + std::int64_t{lease_ms} * 1'000'000,
                                 std::memory_order_release);
    return done(absl::OkStatus());
  }
  v1::RenewRequest request;
  request.set_session_id(content.session->id);
  request.set_lease_ms(lease_ms);
  AddRanges(LeasesOf(content), request.mutable_leases());
  const std::int64_t sent_nanos = NowNanos();
  StartUnaryCall<v1::RenewReply, int>(
      connection_, deadline,
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncRenew(context, request, queue);
      },
      [](const v1::RenewReply& reply) { return absl::StatusOr<int>(reply.ended_size()); },
      [this, &content, lease_ms, sent_nanos,
       done = std::move(done)](const absl::StatusOr<int>& ended) {
        absl::Status status = ended.status();
        if (absl::IsAborted(status)) session_.Ended(content.session);
        if (status.ok() && *ended > 0) {
          content.lost.store(true, std::memory_order_release);
          status = absl::AbortedError(absl::StrCat(*ended, " leases had ended before"));
        }
        if (status.ok()) {
          // Never back: another renewal may have been faster.
          const std::int64_t until = sent_nanos + std::int64_t{lease_ms} * 1'000'000;
          std::int64_t before = content.deadline_nanos.load(std::memory_order_relaxed);
          while (before < until && !content.deadline_nanos.compare_exchange_weak(
                                       before, until, std::memory_order_release)) {
          }
        }
        done(status);
      });
}

void MapCalls::GiveBack(const MappedBlocks::Content& content) {
  Release(content.session, LeasesOf(content));
  DropIdleLater();
}

void MapCalls::Release(const SessionPtr& session, const std::vector<std::uint64_t>& leases) {
  if (leases.empty() || session->ended.load(std::memory_order_acquire)) return;
  v1::ReleaseRequest request;
  request.set_session_id(session->id);
  AddRanges(leases, request.mutable_leases());
  StartUnaryCall<v1::BlockCount, int>(
      connection_, std::chrono::system_clock::now() + kReleaseTimeout,
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.cache->PrepareAsyncRelease(context, request, queue);
      },
      [](const v1::BlockCount&) { return absl::StatusOr<int>(0); },
      [](const absl::StatusOr<int>&) {});
}

void MapCalls::DropIdleLater() {
  if (drop_is_due_.exchange(true)) return;
  connection_.PostAt(std::chrono::steady_clock::now() + ArenaMappings::kIdleMax,
                     [this] { DropIdle(); });
}

void MapCalls::DropIdle() {
  drop_is_due_.store(false);
  if (mappings_.DropIdle(std::chrono::steady_clock::now()) > 0) DropIdleLater();
}

}  // namespace kvmill
