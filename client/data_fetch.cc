#include "client/data_fetch.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/data_operation.h"
#include "storage/core/mutex.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// What one call asks for: enough for its costs to vanish, small enough that one part is verified
// while the next one travels.
constexpr std::uint64_t kCallBytes = std::uint64_t{1} << 20;
constexpr std::size_t kCallsInFlight = 3;
// At most: the fingerprint, and what Elsewhere has.
constexpr std::size_t kHeaderBytesWithoutKeys = 128 + kHintBytesMax + kBlockKeyBytesMax + 32;
// Up to here a reply is verified where it arrives: the bytes are in that core's cache, and to read
// them there takes less than to hand them to another.
constexpr std::uint64_t kVerifyAtOnceBytes = 256 << 10;

absl::Status Malformed(absl::string_view what, std::uint64_t got, std::uint64_t want) {
  return absl::InternalError(
      absl::StrCat("malformed reply to a fetch: ", what, " ", got, ", want ", want));
}

// A call's reply is placed on the transport's thread, which must not wait; small ones are verified
// there as well. Else pages are verified, and all are handed over, on the link's workers, or by the
// caller who waits for them anyway.
class DataFetch final : public DataOperation<FetchResult> {
 public:
  DataFetch(DataLink& link, ConnectionPtr connection, std::shared_ptr<const ClientNamespace> ns,
            absl::Span<const BlockKey> keys, FetchSink& sink, const Elsewhere& elsewhere,
            Deadline deadline, WaitingCaller* caller, Done done)
      : DataOperation(link, std::move(connection), deadline, std::move(done)),
        ns_holder_(std::move(ns)),
        ns_(*ns_holder_),
        keys_(keys),
        sink_(sink),
        elsewhere_(elsewhere),
        caller_(caller) {
    result_.blocks.resize(keys.size());
    for (FetchBlockResult& block : result_.blocks) block.status = absl::OkStatus();
    std::uint64_t block_bytes = 0;
    for (const LayerGroup& group : ns_.spec.groups) {
      block_bytes +=
          group.layers.size() * UniformPageBytes(FormatOf(ns_.spec, group), ns_.spec.block_tokens,
                                                 SlotKind::kTile, group.kv_heads);
    }
    call_keys_max_ = static_cast<std::size_t>(std::max<std::uint64_t>(1, kCallBytes / block_bytes));
  }

  void Start() {
    std::vector<Part> parts;
    {
      MutexLock lock(mu_);
      TakeParts(&parts);
    }
    if (parts.empty()) return Complete();  // No keys.
    if (caller_ != nullptr) caller_->StandInFor(connection());
    for (const Part& part : parts) AskFor(part);
  }

 private:
  // Of the keys: what one call asks for.
  struct Part {
    std::size_t first_key = 0;
    std::size_t key_count = 0;
    std::uint32_t first_group = 0;
  };
  struct Page {
    std::size_t entry = 0;  // Of the reply.
    FetchSink::PageId id;
    absl::Span<std::byte> memory;
    bool in_own_memory = false;
  };
  struct PartCall {
    Part part;
    v1::DataFetchReply reply;
    std::vector<Page> pages;
    std::unique_ptr<std::byte[]> own_memory;
    std::vector<absl::Status> verified;  // Of `pages`; empty: not yet.
    bool announced = false;              // The sink knows the groups.
  };
  using PartCallPtr = std::shared_ptr<PartCall>;  // Of the call's callbacks, and of a task.

  // Parts that may start now.
  void TakeParts(std::vector<Part>* parts) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (!failed() && calls_ < kCallsInFlight) {
      Part part;
      if (!rest_.empty()) {
        part = rest_.front();
        rest_.pop_front();
      } else if (next_key_ < keys_.size()) {
        part.first_key = next_key_;
        std::size_t header_bytes = kHeaderBytesWithoutKeys + RequestBytes(request());
        while (next_key_ < keys_.size() && part.key_count < call_keys_max_) {
          header_bytes += keys_[next_key_].view().size() + 2;
          if (header_bytes > kCallHeaderBytesMax && part.key_count > 0) break;
          ++part.key_count;
          ++next_key_;
        }
      } else {
        return;
      }
      ++calls_;
      parts->push_back(part);
    }
  }

  void AskFor(const Part& part) {
    auto call = std::make_shared<PartCall>();
    call->part = part;
    v1::DataRequest request;
    v1::DataFetch* fetch = request.mutable_fetch();
    fetch->set_fingerprint(std::string(AsBytes(ns_.fingerprint)));
    fetch->set_first_group(part.first_group);
    for (std::size_t i = 0; i < part.key_count; ++i) {
      fetch->add_keys(std::string(keys_[part.first_key + i].view()));
    }
    if (elsewhere_ != Elsewhere()) {
      ToProto(From(elsewhere_, keys_, part.first_key), fetch->mutable_elsewhere());
    }
    Call transport_call;
    transport_call.place = [this, call](const ResponseHead& head, DestinationSpans* spans) {
      return Place(call.get(), head, spans);
    };
    transport_call.done = [this, call](absl::StatusOr<Response> response) {
      // A reply without pages was not placed.
      absl::Status status = response.status();
      if (status.ok() && response->payload_bytes == 0) {
        status = Read(call.get(), {response->header, 0});
      }
      if (status.ok() && response->payload_bytes <= kVerifyAtOnceBytes) Verify(call.get());
      const auto task = [this, call, status] { Finish(call, status); };
      if (caller_ != nullptr) {
        caller_->Post(task);
      } else {
        link().workers().Post(task);
      }
    };
    StartCall(&request, std::move(transport_call));
  }

  // Parses the reply's header and lists its pages.
  absl::Status Read(PartCall* call, const ResponseHead& head) const {
    if (!call->reply.ParseFromArray(head.header.data(), static_cast<int>(head.header.size()))) {
      return absl::InternalError("malformed reply to a fetch: its header does not parse");
    }
    const std::size_t groups = ns_.spec.groups.size();
    const std::size_t asked = call->part.key_count * groups - call->part.first_group;
    const auto count = static_cast<std::size_t>(call->reply.groups_size());
    if (count == 0 || count > asked) return Malformed("layer groups", count, asked);
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const v1::FetchReply& entry = call->reply.groups(static_cast<int>(i));
      const std::size_t number = call->part.first_group + i;
      if (entry.block() != number / groups)
        return Malformed("block", entry.block(), number / groups);
      if (entry.group() != number % groups)
        return Malformed("group", entry.group(), number % groups);
      if (entry.status().code() != 0) {
        if (entry.page_bytes_size() != 0) return Malformed("pages of a failed block", 1, 0);
        continue;
      }
      const LayerGroup& group = ns_.spec.groups[entry.group()];
      if (static_cast<std::size_t>(entry.page_bytes_size()) != group.layers.size()) {
        return Malformed("pages", static_cast<std::uint64_t>(entry.page_bytes_size()),
                         group.layers.size());
      }
      if (entry.token_count() == 0 || entry.token_count() > ns_.spec.block_tokens) {
        return Malformed("tokens", entry.token_count(), ns_.spec.block_tokens);
      }
      KVMILL_RETURN_IF_ERROR(FromProto(entry.tier()).status());
      const std::size_t page_bytes_max = UniformPageBytes(
          FormatOf(ns_.spec, group), ns_.spec.block_tokens, SlotKind::kRaw, group.kv_heads);
      for (const std::uint32_t page_bytes : entry.page_bytes()) {
        if (page_bytes == 0 || page_bytes > page_bytes_max) {
          return Malformed("page of", page_bytes, page_bytes_max);
        }
        bytes += page_bytes;
      }
    }
    if (bytes != head.payload_bytes) return Malformed("payload", head.payload_bytes, bytes);
    return absl::OkStatus();
  }

  absl::Status Place(PartCall* call, const ResponseHead& head, DestinationSpans* spans) {
    KVMILL_RETURN_IF_ERROR(Read(call, head));
    for (int i = 0; i < call->reply.groups_size(); ++i) {
      const v1::FetchReply& entry = call->reply.groups(i);
      for (int layer = 0; layer < entry.page_bytes_size(); ++layer) {
        Page& page = call->pages.emplace_back();
        page.entry = static_cast<std::size_t>(i);
        page.id.block = static_cast<std::uint32_t>(call->part.first_key) + entry.block();
        page.id.group = static_cast<std::uint8_t>(entry.group());
        page.id.layer_index = static_cast<std::uint32_t>(layer);
      }
    }
    const auto bytes_of = [call](const Page& page) -> std::size_t {
      return call->reply.groups(static_cast<int>(page.entry))
          .page_bytes(static_cast<int>(page.id.layer_index));
    };
    // While another part is with the sink the transport does not wait for it: the pages go to
    // memory of our own and are copied later.
    if (sink_mu_.TryLock()) {
      Announce(call);
      for (Page& page : call->pages) {
        if (!result_.blocks[page.id.block].status.ok()) continue;  // It will be dropped.
        page.memory = sink_.PageMemory(page.id, bytes_of(page));
      }
      sink_mu_.Unlock();
    }
    std::size_t own_bytes = 0;
    for (Page& page : call->pages) {
      const std::size_t bytes = bytes_of(page);
      page.in_own_memory = page.memory.size() != bytes;
      if (page.in_own_memory) own_bytes += bytes;
    }
    if (own_bytes > 0) call->own_memory.reset(new std::byte[own_bytes]);
    std::byte* next = call->own_memory.get();
    for (Page& page : call->pages) {
      if (page.in_own_memory) {
        page.memory = absl::MakeSpan(next, bytes_of(page));
        next += page.memory.size();
      }
      spans->push_back(page.memory);
    }
    return absl::OkStatus();
  }

  void Announce(PartCall* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink_mu_) {
    call->announced = true;
    for (const v1::FetchReply& entry : call->reply.groups()) {
      const std::size_t block = call->part.first_key + entry.block();
      absl::Status& status = result_.blocks[block].status;
      if (entry.page_bytes_size() == 0 || !status.ok()) continue;
      status =
          sink_.OnGroup(static_cast<std::uint32_t>(block), static_cast<std::uint8_t>(entry.group()),
                        entry.token_count(),
                        absl::MakeConstSpan(entry.page_bytes().data(),
                                            static_cast<std::size_t>(entry.page_bytes_size())));
    }
  }

  PageIdentity IdentityOf(const Page& page, std::uint32_t token_count) const {
    const LayerGroup& group = ns_.spec.groups[page.id.group];
    PageIdentity want;
    want.fingerprint = ns_.fingerprint;
    want.key = keys_[page.id.block];
    want.group_index = page.id.group;
    want.layer = group.layers[page.id.layer_index];
    want.head_count = group.kv_heads;
    want.token_count = static_cast<std::uint16_t>(token_count);
    want.format = FormatOf(ns_.spec, group);
    want.source_dtype = ns_.spec.source_dtype;
    want.frame = ns_.spec.frame;
    return want;
  }

  void Verify(PartCall* call) const {
    call->verified.reserve(call->pages.size());
    for (const Page& page : call->pages) {
      if (sink_.verifies()) {
        call->verified.push_back(absl::OkStatus());
        continue;
      }
      const v1::FetchReply& entry = call->reply.groups(static_cast<int>(page.entry));
      call->verified.push_back(VerifyPage(IdentityOf(page, entry.token_count()), page.memory));
    }
  }

  // Task of a worker or of the caller: the reply is there, or will not come.
  void Finish(const PartCallPtr& call, const absl::Status& status) {
    if (status.ok()) {
      if (call->verified.empty()) Verify(call.get());
      MutexLock lock(sink_mu_);
      if (!call->announced) Announce(call.get());
      std::size_t i = 0;
      for (const v1::FetchReply& entry : call->reply.groups()) {
        NoteEntry(call->part.first_key + entry.block(), entry);
        for (int page = 0; page < entry.page_bytes_size(); ++page, ++i) {
          HandOver(&call->pages[i], call->verified[i]);
        }
      }
    }
    std::vector<Part> parts;
    bool over = false;
    {
      MutexLock lock(mu_);
      if (status.ok()) {
        KeepRest(*call);
      } else {
        Fail(status);
      }
      --calls_;
      TakeParts(&parts);
      over = calls_ == 0;
    }
    for (const Part& part : parts) AskFor(part);
    if (!over) return;
    if (caller_ != nullptr) caller_->StandInFor(nullptr);
    Complete();
  }

  void HandOver(Page* page, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink_mu_) {
    FetchBlockResult& block = result_.blocks[page->id.block];
    if (!block.status.ok()) return;  // Of an earlier page: the rest is dropped.
    if (status.ok()) {
      if (page->in_own_memory) {
        const absl::Span<std::byte> memory = sink_.PageMemory(page->id, page->memory.size());
        if (memory.size() == page->memory.size()) {
          std::memcpy(memory.data(), page->memory.data(), memory.size());
          page->memory = memory;
        }
      }
      const absl::StatusOr<PageView> view = PageView::Parse(page->memory);
      result_.page_bytes += page->memory.size();
      status = view.ok() ? sink_.OnPage(page->id, *view) : view.status();
    }
    block.status = status;
  }

  // What the reply says beside its pages.
  void NoteEntry(std::size_t index, const v1::FetchReply& entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink_mu_) {
    FetchBlockResult& block = result_.blocks[index];
    const absl::Status status = FromProto(entry.status());
    if (!status.ok()) {
      if (block.status.ok()) block.status = status;
      return;
    }
    const absl::StatusOr<Tier> tier = FromProto(entry.tier());  // OK: Read checked it.
    block.tier = entry.group() == 0 ? *tier : std::max(block.tier, *tier);
    block.token_count = entry.token_count();
  }

  // What the reply had no room for is asked for by another call.
  void KeepRest(const PartCall& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::size_t groups = ns_.spec.groups.size();
    const std::size_t end =
        call.part.first_group + static_cast<std::size_t>(call.reply.groups_size());
    if (end == call.part.key_count * groups) return;
    Part rest;
    rest.first_key = call.part.first_key + end / groups;
    rest.key_count = call.part.key_count - end / groups;
    rest.first_group = static_cast<std::uint32_t>(end % groups);
    rest_.push_back(rest);
  }

  void Complete() {
    FetchResult result;
    {
      MutexLock lock(sink_mu_);
      result = std::move(result_);
    }
    result.transport = connection()->info().transport;
    End(std::move(result));
  }

  const std::shared_ptr<const ClientNamespace> ns_holder_;
  const ClientNamespace& ns_;
  const absl::Span<const BlockKey> keys_;
  FetchSink& sink_;
  const Elsewhere elsewhere_;
  WaitingCaller* const caller_;    // May be null.
  std::size_t call_keys_max_ = 1;  // Constant after construction.

  std::size_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::size_t next_key_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Part> rest_ ABSL_GUARDED_BY(mu_);  // That replies had no room for.
  Mutex sink_mu_;  // Held while the sink is called, so that calls come one at a time.
  FetchResult result_ ABSL_GUARDED_BY(sink_mu_);
};

}  // namespace

void StartDataFetch(DataLink& link, ConnectionPtr connection,
                    std::shared_ptr<const ClientNamespace> ns, absl::Span<const BlockKey> keys,
                    FetchSink& sink, const Elsewhere& elsewhere,
                    std::chrono::system_clock::time_point deadline, WaitingCaller* caller,
                    std::function<void(absl::StatusOr<FetchResult>)> done) {
  // Deletes itself after `done`.
  (new DataFetch(link, std::move(connection), std::move(ns), keys, sink, elsewhere, deadline,
                 caller, std::move(done)))
      ->Start();
}

}  // namespace kvmill
