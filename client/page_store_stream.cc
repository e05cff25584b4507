#include "client/page_store_stream.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "client/convert.h"

namespace kvmill {
namespace {

// After the end of a call, for the news that nobody reads.
constexpr std::chrono::milliseconds kConfirmMax{500};

}  // namespace

absl::Status MemoryUnregistered() {
  return absl::CancelledError(
      "UnregisterMemory came before the block was stored: register its memory and store it again");
}

PageStoreStream::PageStoreStream(Connection& connection, ClientSession& session,
                                 const ClientNamespace& ns, RegisteredMemoryPtr memory,
                                 std::uint64_t number, absl::Span<const PageBlock> blocks,
                                 const PageStoreOptions& options, std::function<void()> changed,
                                 Done done)
    : connection_(connection),
      session_(session),
      ns_(ns),
      memory_(std::move(memory)),
      number_(number),
      options_(options),
      changed_(std::move(changed)),
      done_(std::move(done)),
      pieces_(ns_.spec, memory_->geometry, blocks),
      results_(blocks.size(), ns.spec.groups.size()),
      given_up_(blocks.size()) {
  pieces_.Ready(options.ready_layers);
  // Layer groups that this memory has nothing of are for others to store.
  std::vector<bool> has(ns.spec.groups.size(), false);
  for (const EngineLayers& entry : memory_->geometry.layers) has[entry.group] = true;
  for (std::uint32_t group = 0; group < has.size(); ++group) {
    if (has[group]) continue;
    for (std::uint32_t block = 0; block < blocks.size(); ++block) {
      AddFailure(block, group, v1::STORE_PARTIAL, absl::OkStatus());
    }
  }
}

void PageStoreStream::AddFailure(std::uint32_t block, std::uint32_t group, v1::StoreOutcome outcome,
                                 const absl::Status& status) {
  v1::StoreResult result;
  result.set_sequence(block);
  result.set_group(group);
  result.set_outcome(outcome);
  ToProto(status, result.mutable_status());
  results_.Add(result);
}

std::vector<std::uint32_t> PageStoreStream::Find(absl::Span<const BlockKey> keys) {
  absl::flat_hash_set<absl::string_view> wanted;
  for (const BlockKey& key : keys) wanted.insert(key.view());
  std::vector<std::uint32_t> found;
  MutexLock lock(mu_);
  for (std::uint32_t block = 0; block < pieces_.block_count(); ++block) {
    if (keys.empty() || wanted.contains(pieces_.key(block).view())) found.push_back(block);
  }
  return found;
}

void PageStoreStream::Start(Deadline deadline) {
  deadline_ = deadline;
  self_ = shared_from_this();
  connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
    if (!admission.status.ok()) {
      Complete(admission.status);
      return;
    }
    started_ = true;
    pass_ = admission.pass;
    channel_ = connection_.channel();
    MutexLock lock(mu_);
    stream_ = channel_->cache->PrepareAsyncStore(&context_, connection_.queue());
    stream_->StartCall(&start_done_);
  });
}

void PageStoreStream::OnStart(bool ok) {
  MutexLock lock(mu_);
  if (!ok) {
    writes_ended_ = reads_ended_ = true;
    FinishIfIdle();
    return;
  }
  v1::StoreBegin* begin = message_.mutable_begin();
  begin->mutable_namespace_()->set_fingerprint(std::string(AsBytes(ns_.fingerprint)));
  begin->set_wait(options_.wait_durable ? v1::WAIT_DURABLE : v1::WAIT_SEALED);
  begin->mutable_pages()->set_session_id(memory_->session->id);
  begin->mutable_pages()->set_registration(memory_->registration);
  begin->mutable_pages()->set_store(number_);
  writing_ = true;
  stream_->Write(message_, &write_done_);
  stream_->Read(&reply_, &read_done_);
}

void PageStoreStream::OnWrite(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (!ok) writes_ended_ = true;  // The status says why.
  WriteNext();
  FinishIfIdle();
}

void PageStoreStream::WriteNext() {
  if (!begun_ || writing_ || writes_ended_ || !cancelled_.ok()) return;
  message_.Clear();
  if (pieces_.Next(message_.mutable_chunk())) {
    writing_ = true;
    stream_->Write(message_, &write_done_);
  } else if (pieces_.finished()) {
    writing_ = writes_ended_ = true;
    stream_->WritesDone(&half_close_done_);
  }
}

void PageStoreStream::OnHalfClose(bool) {
  MutexLock lock(mu_);
  writing_ = false;
  FinishIfIdle();
}

void PageStoreStream::OnRead(bool ok) {
  bool rested = false;
  {
    MutexLock lock(mu_);
    if (!ok) {
      reads_ended_ = true;
      FinishIfIdle();
      return;
    }
    if (reply_.has_begun()) {
      begun_ = true;
    } else if (reply_.has_summary()) {
      durable_ = FromProto(reply_.summary().durable());
    } else if (reply_.has_result()) {
      v1::StoreResult& result = *reply_.mutable_result();
      pieces_.Closed(result.sequence(), result.group());
      // The daemon knows only that no more comes of it.
      if (result.outcome() == v1::STORE_PARTIAL && result.sequence() < given_up_.size() &&
          !given_up_[result.sequence()].ok()) {
        result.set_outcome(v1::STORE_FAILED);
        ToProto(given_up_[result.sequence()], result.mutable_status());
      }
      results_.Add(result);
      rested = true;
    }
    WriteNext();
  }
  if (rested) changed_();
  // Last: the end of the call may follow on another thread.
  stream_->Read(&reply_, &read_done_);
}

void PageStoreStream::FinishIfIdle() {
  // The daemon ended the call, or the transport did: nothing more is written.
  if (!reads_ended_ || writing_ || finishing_) return;
  finishing_ = writes_ended_ = true;
  stream_->Finish(&grpc_status_, &finish_done_);
}

void PageStoreStream::OnFinish(bool) {
  connection_.NoteBootId(context_);
  if (grpc_status_.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
    connection_.PassRefused(pass_);
  }
  absl::Status status;
  stream_.reset();
  channel_.reset();
  bool ask = false;
  {
    MutexLock lock(mu_);
    status = cancelled_.ok() ? connection_.StatusOf(grpc_status_) : FromGrpc(grpc_status_);
    if (!cancelled_.ok() && absl::IsCancelled(status)) status = cancelled_;
    // The daemon noticed before this client did that it had left the door, where sessions end.
    if (absl::IsUnauthenticated(status)) {
      status = absl::AbortedError("the session ended: register the memory again");
    }
    // It heard of the end of the registration before it heard of this store.
    if (absl::IsNotFound(status) && !begun_ && memory_->unregistering.load()) {
      status = MemoryUnregistered();
      cancelled_as_ = CancelAs::kBlocks;
    }
    status_ = status;
    ask = !status.ok() && pieces_.sent_anything();
  }
  if (ask) {
    Confirm(std::max(deadline_, std::chrono::system_clock::now()) + kConfirmMax);
  } else {
    Complete(status);
  }
}

void PageStoreStream::Confirm(Deadline deadline) {
  {
    MutexLock lock(mu_);
    if (free_ || std::exchange(confirming_, true)) return;
  }
  session_.CancelStores(
      memory_->session, {number_}, deadline,
      [self = shared_from_this()](const absl::Status& status) { self->Confirmed(status); });
}

void PageStoreStream::Confirmed(const absl::Status& status) {
  absl::Status outcome;
  Deadline again;
  {
    MutexLock lock(mu_);
    confirming_ = false;
    again = ask_until_;
    outcome = status_;
    if (status.ok()) {
      free_ = true;
    } else {
      outcome = absl::DeadlineExceededError(
          absl::StrCat("the daemon may still read the pages: ", status.message(),
                       "; the store had ended with: ", status_.message()));
    }
  }
  const std::shared_ptr<PageStoreStream> self = shared_from_this();
  Complete(outcome);
  if (absl::IsDeadlineExceeded(status) && std::chrono::system_clock::now() < again) Confirm(again);
}

void PageStoreStream::Complete(absl::Status status) {
  Done done;
  absl::StatusOr<StoreResult> result = absl::UnknownError("");
  {
    MutexLock lock(mu_);
    done = std::exchange(done_, nullptr);
    if (done != nullptr && (status.ok() || !pieces_.sent_anything())) free_ = true;
    if (absl::IsCancelled(status) && cancelled_as_ == CancelAs::kBlocks) {
      CancelRest(status);
      result = results_.Take();
    } else if (!status.ok()) {
      result = status;
    } else if (options_.wait_durable && !durable_.ok()) {
      result = durable_;
    } else {
      result = results_.Take();
    }
  }
  const std::shared_ptr<PageStoreStream> self = shared_from_this();
  const bool first = done != nullptr;
  if (first) done(std::move(result));
  changed_();
  if (!first) return;
  self_.reset();
  if (started_) connection_.End(&context_);
}

void PageStoreStream::Ready(std::uint32_t layers) {
  MutexLock lock(mu_);
  pieces_.Ready(layers);
  WriteNext();
}

void PageStoreStream::GiveUpUnready(absl::Span<const std::uint32_t> blocks,
                                    const absl::Status& why) {
  MutexLock lock(mu_);
  if (pieces_.all_ready()) return;
  for (const std::uint32_t block : blocks) {
    for (std::uint32_t group = 0; group < ns_.spec.groups.size(); ++group) {
      if (!pieces_.open(block, group)) continue;
      given_up_[block] = why;
      if (pieces_.GiveUp(block, group)) AddFailure(block, group, v1::STORE_FAILED, why);
    }
  }
  WriteNext();
}

void PageStoreStream::CancelRest(const absl::Status& why) {
  const std::size_t groups = ns_.spec.groups.size();
  // Of what is stored nobody knows whether it is durable.
  if (options_.wait_durable) results_ = StoreResults(given_up_.size(), groups);
  for (std::uint32_t block = 0; block < given_up_.size(); ++block) {
    for (std::uint32_t group = 0; group < groups; ++group) {
      if (!results_.closed(block, group)) AddFailure(block, group, v1::STORE_FAILED, why);
    }
  }
}

void PageStoreStream::Cancel(CancelAs as, const absl::Status& why) {
  MutexLock lock(mu_);
  if (done_ == nullptr || !cancelled_.ok()) return;
  cancelled_ = why;
  cancelled_as_ = as;
  if (!pieces_.sent_anything()) free_ = true;  // And nothing will be.
  context_.TryCancel();
}

void PageStoreStream::AskUntil(Deadline deadline) {
  {
    MutexLock lock(mu_);
    ask_until_ = std::max(ask_until_, deadline);
    if (done_ != nullptr || free_) return;  // The call's end leads to it.
  }
  Confirm(deadline);
}

bool PageStoreStream::free() {
  MutexLock lock(mu_);
  return free_;
}

bool PageStoreStream::over() {
  MutexLock lock(mu_);
  return done_ == nullptr;
}

bool PageStoreStream::AtRest(absl::Span<const std::uint32_t> blocks) {
  MutexLock lock(mu_);
  return free_ || std::all_of(blocks.begin(), blocks.end(),
                              [this](std::uint32_t block) { return pieces_.AtRest(block); });
}

}  // namespace kvmill
