#include "client/data_store.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/data_operation.h"
#include "client/store_chunks.h"
#include "client/store_results.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// The unit of encoding and of one call: below what a daemon receives at once, and enough for its
// costs to vanish.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
constexpr std::size_t kPiecesInFlight = 8;

// Pieces are encoded or gathered, and replies handled, on the link's workers.
class DataStore final : public DataOperation<StoreResult> {
 public:
  DataStore(DataLink& link, ConnectionPtr connection, const ClientNamespace& ns,
            absl::Span<const StoreBlock> blocks, const StoreOptions& options, bool encode,
            Deadline deadline, Done done)
      : DataOperation(link, std::move(connection), deadline, std::move(done)),
        ns_(ns),
        blocks_(blocks),
        options_(options),
        encode_(encode),
        pieces_(ns_, blocks_, options_, kPieceBytes),
        results_(blocks.size(), ns.spec.groups.size()),
        groups_(blocks.size() * ns.spec.groups.size()) {}

  void Start() {
    bool over = false;
    {
      MutexLock lock(mu_);
      more_ = !blocks_.empty();
      if (more_) next_ = pieces_.First();
      over = !more_;
      PostPieces();
    }
    if (over) Complete();
  }

 private:
  // One (block, layer group) on its way.
  struct Group {
    std::uint32_t pending = 0;  // Pieces that were started and have not ended.
    bool all_started = false;
    bool asked = false;  // What became of it.
    std::uint64_t raw_bytes = 0;
    std::uint32_t existing_heads = 0;
    v1::StoreResult result;  // What the chunks' results amount to; PARTIAL to begin with.
  };
  // A piece while its chunks travel.
  struct Flight {
    StorePiece piece;
    std::vector<StoreChunk> chunks;
    std::size_t left = 0;  // Chunks without an answer. Guarded by mu_.
  };
  using FlightPtr = std::shared_ptr<Flight>;  // Of tasks and of the calls' callbacks.

  Group& GroupOf(const StorePiece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return groups_[piece.block * ns_.spec.groups.size() + piece.group];
  }

  // Hands pieces to the workers as far as the window goes.
  void PostPieces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (!failed() && more_ && in_flight_ < kPiecesInFlight) {
      Group& group = GroupOf(next_);
      const StorePiece piece = next_;
      if (Decided(group)) {
        more_ = pieces_.NextGroup(&next_);
        continue;
      }
      if (piece.last) group.all_started = true;
      more_ = pieces_.Next(&next_);
      ++group.pending;
      ++in_flight_;
      auto flight = std::make_shared<Flight>();
      flight->piece = piece;
      link().workers().Post([this, flight] { SendPiece(flight); });
    }
  }

  void SendPiece(const FlightPtr& flight) {
    const StorePiece& piece = flight->piece;
    absl::Status status;
    if (encode_ && pieces_.MayEncode(piece)) {
      status = pieces_.Encode(piece, &flight->chunks);
    } else {
      flight->chunks.push_back(pieces_.Gather(piece));
    }
    if (!status.ok()) {
      bool over = false;
      {
        MutexLock lock(mu_);
        Group& group = GroupOf(piece);
        group.result.set_outcome(v1::STORE_FAILED);
        ToProto(status, group.result.mutable_status());
        over = EndPiece(piece);
      }
      if (over) Complete();
      return;
    }
    {
      MutexLock lock(mu_);
      flight->left = flight->chunks.size();
    }
    for (StoreChunk& chunk : flight->chunks) {
      v1::DataRequest request;
      *request.mutable_store()->mutable_chunk() = chunk.head;
      Send(&request, std::move(chunk.bytes),
           [this, flight, raw_bytes = chunk.raw_bytes](absl::StatusOr<Response> response) {
             OnReply(flight, raw_bytes, response);
           });
    }
  }

  void Send(v1::DataRequest* request, SourceSpans payload,
            std::function<void(absl::StatusOr<Response>)> done) {
    const std::string fingerprint(AsBytes(ns_.fingerprint));
    if (request->has_store()) {
      request->mutable_store()->set_fingerprint(fingerprint);
      request->mutable_store()->set_wait(options_.wait_durable ? v1::WAIT_DURABLE
                                                               : v1::WAIT_SEALED);
    } else {
      request->mutable_durable()->set_fingerprint(fingerprint);
    }
    Call call;
    call.payload = std::move(payload);
    // Not on the transport's thread: what follows may gather bytes.
    call.done = [this, done = std::move(done)](absl::StatusOr<Response> response) {
      auto shared = std::make_shared<absl::StatusOr<Response>>(std::move(response));
      link().workers().Post([done, shared] { done(std::move(*shared)); });
    };
    StartCall(request, std::move(call));
  }

  // The result that a reply carries; a failure is one of the whole call.
  static absl::StatusOr<v1::DataStoreReply> ParseReply(const absl::StatusOr<Response>& response) {
    KVMILL_RETURN_IF_ERROR(response.status());
    v1::DataStoreReply reply;
    if (!reply.ParseFromArray(response->header.data(), static_cast<int>(response->header.size())) ||
        !reply.has_result()) {
      return absl::InternalError("malformed reply to a store");
    }
    return reply;
  }

  void OnReply(const FlightPtr& flight, std::uint64_t raw_bytes,
               const absl::StatusOr<Response>& response) {
    bool over = false;
    {
      MutexLock lock(mu_);
      const absl::StatusOr<v1::DataStoreReply> reply = ParseReply(response);
      if (reply.ok()) {
        Merge(*reply, raw_bytes, &GroupOf(flight->piece));
      } else {
        Fail(reply.status());
      }
      if (--flight->left == 0) over = EndPiece(flight->piece);
    }
    if (over) Complete();
  }

  // A group failed if one of its chunks did; it is stored if one completed it, else existing if it
  // was complete before.
  static void Merge(const v1::DataStoreReply& reply, std::uint64_t raw_bytes, Group* group) {
    const auto rank = [](v1::StoreOutcome outcome) {
      switch (outcome) {
        case v1::STORE_FAILED:
          return 3;
        case v1::STORE_STORED:
          return 2;
        case v1::STORE_EXISTING:
          return 1;
        default:
          return 0;
      }
    };
    const v1::StoreResult& result = reply.result();
    group->existing_heads += reply.existing_heads();
    if (result.outcome() == v1::STORE_PARTIAL || result.outcome() == v1::STORE_STORED) {
      group->raw_bytes += raw_bytes;
    }
    const v1::StoreOutcome before =
        group->result.has_status() ? group->result.outcome() : v1::STORE_PARTIAL;
    if (!group->result.has_status() || rank(result.outcome()) > rank(before)) {
      group->result = result;
    }
  }

  // Nothing that still comes changes what became of it.
  static bool Decided(const Group& group) {
    return group.result.has_status() && (group.result.outcome() == v1::STORE_FAILED ||
                                         group.result.outcome() == v1::STORE_EXISTING);
  }

  // True when the operation is over.
  bool EndPiece(const StorePiece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Group& group = GroupOf(piece);
    --group.pending;
    --in_flight_;
    const v1::StoreOutcome outcome = group.result.outcome();
    if (!failed() && !results_.closed(piece.block, piece.group)) {
      if (group.pending == 0 && group.all_started && outcome == v1::STORE_PARTIAL &&
          group.existing_heads > 0 && !group.asked) {
        Ask(piece, &group);  // Another writer wrote some heads: it may have completed the block.
      } else if (group.pending == 0 && (group.all_started || Decided(group))) {
        Close(piece, &group);
      }
    }
    PostPieces();
    return in_flight_ == 0 && (!more_ || failed());
  }

  void Close(const StorePiece& piece, Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    group->result.set_sequence(piece.block);
    group->result.set_group(piece.group);
    group->result.set_raw_bytes(group->raw_bytes);
    results_.Add(group->result);
  }

  void Ask(const StorePiece& piece, Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    group->asked = true;
    ++group->pending;
    ++in_flight_;
    v1::DataRequest request;
    v1::StoreChunk* head = request.mutable_store()->mutable_chunk();
    StorePiece nothing = piece;
    nothing.layer_count = 0;
    *head = pieces_.HeadOf(nothing);
    auto flight = std::make_shared<Flight>();
    flight->piece = piece;
    flight->left = 1;
    Send(&request, {},
         [this, flight](absl::StatusOr<Response> response) { OnReply(flight, 0, response); });
  }

  // Everything has its result; durable is what may be left to wait for.
  void Complete() {
    std::vector<v1::DataRequest> requests;
    if (options_.wait_durable) {
      MutexLock lock(mu_);
      if (!failed()) requests = DurableRequests();
      in_flight_ = requests.size();
    }
    if (requests.empty()) return Finish();
    for (v1::DataRequest& request : requests) {
      Send(&request, {}, [this](const absl::StatusOr<Response>& response) {
        bool over = false;
        {
          MutexLock lock(mu_);
          Fail(response.status());
          over = --in_flight_ == 0;
        }
        if (over) Finish();
      });
    }
  }

  std::vector<v1::DataRequest> DurableRequests() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<v1::DataRequest> requests;
    std::size_t header_bytes = kCallHeaderBytesMax;
    const std::size_t group_count = ns_.spec.groups.size();
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      const v1::StoreOutcome outcome = groups_[i].result.outcome();
      if (outcome != v1::STORE_STORED && outcome != v1::STORE_EXISTING) continue;
      const StoreBlock& block = blocks_[i / group_count];
      const BlockKey key =
          StoredKey(ns_.spec.block_tokens, block.parent, block.token_count, block.key);
      header_bytes += key.view().size() + 8;
      if (header_bytes > kCallHeaderBytesMax) {
        requests.emplace_back();
        header_bytes = 128 + RequestBytes(request()) + key.view().size();
      }
      requests.back().mutable_durable()->add_keys(std::string(key.view()));
      requests.back().mutable_durable()->add_groups(static_cast<std::uint32_t>(i % group_count));
    }
    return requests;
  }

  void Finish() {
    StoreResult result;
    {
      MutexLock lock(mu_);
      result = results_.Take();
    }
    End(std::move(result));
  }

  const ClientNamespace ns_;
  const absl::Span<const StoreBlock> blocks_;
  const StoreOptions options_;
  const bool encode_;
  const StorePieces pieces_;

  bool more_ ABSL_GUARDED_BY(mu_) = false;
  StorePiece next_ ABSL_GUARDED_BY(mu_);            // If more_.
  std::size_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;  // Pieces, and questions.
  StoreResults results_ ABSL_GUARDED_BY(mu_);
  std::vector<Group> groups_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

void StartDataStore(DataLink& link, ConnectionPtr connection, const ClientNamespace& ns,
                    absl::Span<const StoreBlock> blocks, const StoreOptions& options, bool encode,
                    std::chrono::system_clock::time_point deadline,
                    std::function<void(absl::StatusOr<StoreResult>)> done) {
  // Deletes itself after `done`.
  (new DataStore(link, std::move(connection), ns, blocks, options, encode, deadline,
                 std::move(done)))
      ->Start();
}

}  // namespace kvmill
