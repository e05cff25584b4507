#include "service/watch_call.h"

#include <utility>

#include "client/convert.h"
#include "service/status_grpc.h"

namespace kvmill {
namespace {

void ToProto(const BlockEvent& event, v1::BlockEvent* to) {
  to->set_namespace_(event.namespace_id);
  const std::string key(event.key.view());
  switch (event.kind) {
    case BlockEvent::Kind::kStored: {
      v1::BlockStored& stored = *to->mutable_stored();
      stored.set_key(key);
      stored.set_parent_key(std::string(event.parent.view()));
      stored.set_token_count(event.token_count);
      stored.set_tier(kvmill::ToProto(event.tier));
      break;
    }
    case BlockEvent::Kind::kMoved:
      to->mutable_moved()->set_key(key);
      to->mutable_moved()->set_from(kvmill::ToProto(event.from));
      to->mutable_moved()->set_to(kvmill::ToProto(event.tier));
      break;
    case BlockEvent::Kind::kRemoved:
      to->mutable_removed()->set_key(key);
      to->mutable_removed()->set_tier(kvmill::ToProto(event.tier));
      break;
    case BlockEvent::Kind::kCleared:
      to->mutable_cleared();
      break;
  }
}

}  // namespace

WatchCall* WatchCall::Start(const ServiceContext& context, grpc::CallbackServerContext& of,
                            EventJournal& journal, const std::string& tenant,
                            const absl::StatusOr<EventJournal::From>& from) {
  const auto call = std::make_shared<WatchCall>(context, of, journal);
  call->self_ = call;
  MutexLock lock(call->mu_);
  if (!from.ok()) {
    call->End(from.status());
    return call.get();
  }
  absl::StatusOr<EventJournal::ReaderPtr> reader =
      journal.Open(tenant, *from, [call] { call->Woken(); });
  if (!reader.ok()) {
    call->End(reader.status());
    return call.get();
  }
  call->reader_ = *std::move(reader);
  call->Advance();
  return call.get();
}

void WatchCall::Woken() {
  {
    MutexLock lock(mu_);
    if (!writing_ || finished_ || cancelling_ || !journal_.Ended(*reader_)) return Advance();
    cancelling_ = true;
  }
  // Without the lock: what gRPC does meanwhile, and on which thread, is its own business.
  call_.TryCancel();
  MutexLock lock(mu_);
  cancelling_ = false;
  Advance();
}

void WatchCall::Advance() {
  if (writing_ || finished_ || cancelling_) return;
  if (end_.has_value()) {
    finished_ = true;
    Finish(StatusToGrpc(*end_));
    return;
  }
  EventJournal::Part part;
  const absl::StatusOr<bool> some = journal_.Next(*reader_, &part);
  if (!some.ok()) return End(some.status());
  if (!*some) return;
  Fill(part);
  writing_ = true;
  StartWrite(&message_);
}

void WatchCall::End(const absl::Status& status) {
  if (!end_.has_value()) end_ = status;
  if (!writing_) Advance();
}

void WatchCall::Fill(const EventJournal::Part& part) {
  using What = EventJournal::Part::What;
  message_.Clear();
  if (!std::exchange(greeted_, true)) message_.set_epoch(context_.boot_id);
  message_.set_snapshot_begin(part.what == What::kSnapshotBegin);
  message_.set_snapshot_end(part.what == What::kSnapshotEnd);
  const bool within_snapshot = part.what == What::kSnapshotBegin || part.what == What::kSnapshot;
  if (!within_snapshot) message_.set_sequence(part.sequence);
  for (const BlockEvent& event : part.events) {
    if (named_.insert(event.namespace_id).second) {
      const auto info = context_.store.FindNamespace(event.namespace_id);
      if (info.ok()) {
        v1::WatchedNamespace& to = *message_.add_namespaces();
        to.set_id(event.namespace_id);
        to.set_name(info->name);
        to.set_fingerprint(std::string(AsBytes(info->fingerprint)));
        to.set_block_tokens(info->spec.block_tokens);
        to.set_model(info->spec.model);
        to.set_adapter_digest(info->spec.adapter_digest);
        to.set_hash_scheme(info->spec.hash_scheme);
      }
    }
    ToProto(event, message_.add_events());
  }
}

void WatchCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (!ok && !end_.has_value()) end_ = absl::CancelledError("the caller is gone");
  Advance();
}

void WatchCall::OnCancel() {
  MutexLock lock(mu_);
  if (!finished_) End(absl::CancelledError("the call was cancelled"));
}

void WatchCall::OnDone() {
  EventJournal::ReaderPtr reader;
  {
    MutexLock lock(mu_);
    reader = std::move(reader_);
  }
  if (reader != nullptr) journal_.Close(reader);
  self_ = nullptr;
}

}  // namespace kvmill
