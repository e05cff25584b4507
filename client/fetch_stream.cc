#include "client/fetch_stream.h"

#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "client/convert.h"
#include "storage/core/mutex.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

class FetchStream {
 public:
  FetchStream(Connection& connection, const ClientNamespace& ns, absl::Span<const BlockKey> keys,
              FetchSink& sink, const Elsewhere& elsewhere,
              std::function<void(absl::StatusOr<FetchResult>)> done)
      : connection_(connection),
        ns_(ns),
        keys_(keys),
        sink_(sink),
        elsewhere_(elsewhere),
        done_(std::move(done)) {
    result_.blocks.resize(keys.size());
    result_.transport = "grpc";
  }

  void Start(std::chrono::system_clock::time_point deadline) {
    connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        done_(admission.status);
        delete this;
        return;
      }
      pass_ = admission.pass;
      channel_ = connection_.channel();
      stream_ =
          channel_->generic.PrepareCall(&context_, "/kvmill.v1.Cache/Fetch", connection_.queue());
      stream_->StartCall(&start_done_);
    });
  }

 private:
  void OnStart(bool ok) {
    if (!ok) {
      EndSide(&writes_ended_);
      EndSide(&reads_ended_);
      return;
    }
    v1::FetchRequest request;
    request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns_.fingerprint)));
    for (const BlockKey& key : keys_) request.add_keys(std::string(key.view()));
    if (elsewhere_ != Elsewhere()) ToProto(elsewhere_, request.mutable_elsewhere());
    request_ = ToByteBuffer(request);
    stream_->Read(&incoming_, &read_done_);
    stream_->WriteLast(request_, grpc::WriteOptions(), &write_done_);
  }

  void OnWrite(bool) { EndSide(&writes_ended_); }

  void OnRead(bool ok) {
    if (!ok) {
      EndSide(&reads_ended_);
      return;
    }
    // The next message is read while this one is copied and verified. The lock is taken before the
    // next read starts: so messages are handled in order, one at a time.
    MutexLock lock(mu_);
    if (std::exchange(first_, false)) connection_.NoteBootId(context_);  // The sink may ask for it.
    BulkMessage message;
    v1::FetchReply head;
    absl::Status status = message.Parse(incoming_, 0, &head);
    incoming_.Clear();
    stream_->Read(&incoming_, &read_done_);
    if (!failed_.ok()) return;
    if (status.ok()) status = Handle(head, message);
    if (!status.ok()) {
      failed_ = status;
      context_.TryCancel();
    }
  }

  // Both directions ended: the status is due.
  void EndSide(bool* ended) {
    MutexLock lock(mu_);
    *ended = true;
    if (writes_ended_ && reads_ended_) stream_->Finish(&grpc_status_, &finish_done_);
  }

  void OnFinish(bool) {
    connection_.NoteBootId(context_);
    if (grpc_status_.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
      connection_.PassRefused(pass_);
    }
    absl::StatusOr<FetchResult> result = absl::UnknownError("");
    {
      MutexLock lock(mu_);
      if (!failed_.ok()) {
        result = failed_;
      } else if (!grpc_status_.ok()) {
        result = connection_.StatusOf(grpc_status_);
      } else {
        CloseBlock();
        result = std::move(result_);
      }
    }
    stream_.reset();
    channel_.reset();
    done_(std::move(result));
    Connection& connection = connection_;
    grpc::ClientContext* const context = &context_;
    connection.End(context);
    delete this;
  }

  // One layer group of one block, as its pages arrive.
  struct Group {
    std::uint32_t token_count = 0;
    std::vector<std::uint32_t> page_bytes;
    std::size_t page = 0;            // Being filled.
    std::uint64_t offset_bytes = 0;  // Of all pages, that arrived.
    std::size_t filled_bytes = 0;    // Of the page.
    absl::Span<std::byte> memory;    // Of the page.
    bool in_own_memory = false;
  };

  static absl::Status Malformed(absl::string_view what, std::uint64_t got, std::uint64_t want) {
    return absl::InternalError(
        absl::StrCat("malformed reply to Fetch: ", what, " ", got, ", want ", want));
  }

  absl::Status Handle(const v1::FetchReply& head, const BulkMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const bool starts = head.has_status();
    if (starts) {
      const std::size_t number = next_group_++;
      if (number >= keys_.size() * ns_.spec.groups.size()) {
        return Malformed("group number", number, keys_.size() * ns_.spec.groups.size());
      }
      CloseGroup();
      if (number % ns_.spec.groups.size() == 0) {
        CloseBlock();
        block_ = number / ns_.spec.groups.size();
        block_status_ = absl::OkStatus();
        open_ = true;
      }
      group_ = Group{};
      group_index_ = static_cast<std::uint8_t>(number % ns_.spec.groups.size());
      KVMILL_RETURN_IF_ERROR(StartGroup(head));
    }
    if (!open_ || head.block() != block_) return Malformed("block", head.block(), block_);
    if (head.group() != group_index_) return Malformed("group", head.group(), group_index_);
    if (message.bulk_bytes() == 0) return absl::OkStatus();
    if (head.offset_bytes() != group_.offset_bytes) {
      return Malformed("offset", head.offset_bytes(), group_.offset_bytes);
    }
    for (absl::Span<const std::byte> piece : message.pieces()) {
      while (!piece.empty()) {
        KVMILL_RETURN_IF_ERROR(Take(&piece));
      }
    }
    return absl::OkStatus();
  }

  absl::Status StartGroup(const v1::FetchReply& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::Status status = FromProto(head.status());
    if (!status.ok()) {
      if (block_status_.ok()) block_status_ = status;
      return absl::OkStatus();
    }
    const LayerGroup& group = ns_.spec.groups[group_index_];
    const std::size_t page_count = group.layers.size();
    if (static_cast<std::size_t>(head.page_bytes_size()) != page_count) {
      return Malformed("pages", static_cast<std::uint64_t>(head.page_bytes_size()), page_count);
    }
    if (head.token_count() == 0 || head.token_count() > ns_.spec.block_tokens) {
      return Malformed("tokens", head.token_count(), ns_.spec.block_tokens);
    }
    const std::size_t page_bytes_max = UniformPageBytes(
        FormatOf(ns_.spec, group), ns_.spec.block_tokens, SlotKind::kRaw, group.kv_heads);
    for (std::uint32_t bytes : head.page_bytes()) {
      if (bytes == 0 || bytes > page_bytes_max) return Malformed("page of", bytes, page_bytes_max);
      group_.page_bytes.push_back(bytes);
    }
    KVMILL_ASSIGN_OR_RETURN(const Tier tier, FromProto(head.tier()));
    FetchBlockResult& result = result_.blocks[block_];
    result.tier = group_index_ == 0 ? tier : std::max(result.tier, tier);
    result.token_count = group_.token_count = head.token_count();
    if (block_status_.ok()) {
      block_status_ = sink_.OnGroup(static_cast<std::uint32_t>(block_), group_index_,
                                    group_.token_count, group_.page_bytes);
    }
    return absl::OkStatus();
  }

  // Consumes bytes from `piece`, up to the end of the current page.
  absl::Status Take(absl::Span<const std::byte>* piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (group_.page >= group_.page_bytes.size()) {
      return Malformed("bytes after page", group_.page, group_.page_bytes.size());
    }
    const std::size_t page_bytes = group_.page_bytes[group_.page];
    FetchSink::PageId id;
    id.block = static_cast<std::uint32_t>(block_);
    id.group = group_index_;
    id.layer_index = static_cast<std::uint32_t>(group_.page);
    if (group_.filled_bytes == 0) {
      group_.memory =
          block_status_.ok() ? sink_.PageMemory(id, page_bytes) : absl::Span<std::byte>();
      group_.in_own_memory = group_.memory.size() != page_bytes;
      if (group_.in_own_memory) {
        own_memory_.resize(std::max(own_memory_.size(), page_bytes));
        group_.memory = absl::MakeSpan(own_memory_.data(), page_bytes);
      }
    }
    const std::size_t take = std::min(piece->size(), page_bytes - group_.filled_bytes);
    std::memcpy(group_.memory.data() + group_.filled_bytes, piece->data(), take);
    piece->remove_prefix(take);
    group_.filled_bytes += take;
    group_.offset_bytes += take;
    if (group_.filled_bytes < page_bytes) return absl::OkStatus();
    if (block_status_.ok()) block_status_ = FinishPage(id);
    group_.filled_bytes = 0;
    ++group_.page;
    return absl::OkStatus();
  }

  // The block's status after this page.
  absl::Status FinishPage(const FetchSink::PageId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const LayerGroup& group = ns_.spec.groups[group_index_];
    PageIdentity want;
    want.fingerprint = ns_.fingerprint;
    want.key = keys_[block_];
    want.group_index = group_index_;
    want.layer = group.layers[id.layer_index];
    want.head_count = group.kv_heads;
    want.token_count = static_cast<std::uint16_t>(group_.token_count);
    want.format = FormatOf(ns_.spec, group);
    want.source_dtype = ns_.spec.source_dtype;
    want.frame = ns_.spec.frame;
    if (!sink_.verifies()) KVMILL_RETURN_IF_ERROR(VerifyPage(want, group_.memory));
    KVMILL_ASSIGN_OR_RETURN(const PageView page, PageView::Parse(group_.memory));
    result_.page_bytes += group_.memory.size();
    return sink_.OnPage(id, page);
  }

  // Nothing more of the layer group comes.
  void CloseGroup() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!open_ || !block_status_.ok() || group_.page == group_.page_bytes.size()) return;
    block_status_ = absl::DataLossError(absl::StrCat("block ", block_, ", layer group ",
                                                     group_index_, ": ", group_.page, " of ",
                                                     group_.page_bytes.size(), " pages came"));
  }

  void CloseBlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!open_) return;
    CloseGroup();
    open_ = false;
    const std::size_t groups = ns_.spec.groups.size();
    if (block_status_.ok() && group_index_ + std::size_t{1} != groups) {
      block_status_ = absl::DataLossError(absl::StrCat("block ", block_, ": ", group_index_ + 1,
                                                       " of ", groups, " layer groups came"));
    }
    result_.blocks[block_].status = block_status_;
  }

  Connection& connection_;
  const ClientNamespace ns_;
  const absl::Span<const BlockKey> keys_;
  FetchSink& sink_;
  const Elsewhere elsewhere_;
  std::function<void(absl::StatusOr<FetchResult>)> done_;

  std::uint64_t pass_ = 0;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  MemberCompletion<FetchStream> start_done_{this, &FetchStream::OnStart};
  MemberCompletion<FetchStream> write_done_{this, &FetchStream::OnWrite};
  MemberCompletion<FetchStream> read_done_{this, &FetchStream::OnRead};
  MemberCompletion<FetchStream> finish_done_{this, &FetchStream::OnFinish};
  grpc::Status grpc_status_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer incoming_;

  Mutex mu_;
  bool writes_ended_ = false;               // Guarded by mu_ (EndSide).
  bool reads_ended_ = false;                // Guarded by mu_ (EndSide).
  bool first_ ABSL_GUARDED_BY(mu_) = true;  // No message came yet.
  FetchResult result_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);  // Of the whole call.
  std::size_t next_group_ ABSL_GUARDED_BY(mu_) = 0;
  bool open_ ABSL_GUARDED_BY(mu_) = false;  // A block is being received.
  std::size_t block_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status block_status_ ABSL_GUARDED_BY(mu_);
  std::uint8_t group_index_ ABSL_GUARDED_BY(mu_) = 0;
  Group group_ ABSL_GUARDED_BY(mu_);
  std::vector<std::byte> own_memory_ ABSL_GUARDED_BY(mu_);  // One page.
};

}  // namespace

void StartFetchStream(Connection& connection, const ClientNamespace& ns,
                      absl::Span<const BlockKey> keys, FetchSink& sink, const Elsewhere& elsewhere,
                      std::chrono::system_clock::time_point deadline,
                      std::function<void(absl::StatusOr<FetchResult>)> done) {
  // Deletes itself after `done`.
  (new FetchStream(connection, ns, keys, sink, elsewhere, std::move(done)))->Start(deadline);
}

}  // namespace kvmill
