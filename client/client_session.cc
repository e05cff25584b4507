#include "client/client_session.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "client/convert.h"
#include "client/request_context.h"

namespace kvmill {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kOpenMax{5000};  // What the daemon gets to open a session.
constexpr milliseconds kPauseMin{50};
constexpr milliseconds kPauseMax{2000};
// How soon the death of a daemon is noticed by those who wait for its answer.
constexpr milliseconds kDeathCheck{20};

}  // namespace

// One Engine.Session call. Deletes itself when it is over.
class ClientSession::Stream {
 public:
  explicit Stream(ClientSession& owner) : owner_(owner) {}

  void Start(const SessionPtr& resume) {
    resumed_ = resume;
    const RequestScope nobodys(RequestPtr{});  // It is for all that follows.
    // The call lives long; OnTimer cancels one that does not open.
    owner_.connection_.Admit(&context_, std::chrono::system_clock::now() + kOpenMax,
                             [this](const Connection::Admission& admission) {
                               if (!admission.status.ok()) {
                                 owner_.StreamEnded(admission.status, false);
                                 delete this;
                                 return;
                               }
                               context_.set_deadline(std::chrono::system_clock::time_point::max());
                               pass_ = admission.pass;
                               channel_ = owner_.connection_.channel();
                               stream_ = channel_->engine->PrepareAsyncSession(
                                   &context_, owner_.connection_.queue());
                               stream_->StartCall(&start_done_);
                             });
  }

  void Cancel() { context_.TryCancel(); }

  // Once after each other: a heartbeat that is not answered yet takes the place of the next one.
  void Heartbeat() {
    MutexLock lock(mu_);
    if (!open_ || writing_ || closing_) return;
    writing_ = true;
    request_.Clear();
    request_.mutable_heartbeat()->set_sequence(++heartbeats_);
    stream_->Write(request_, &write_done_);
  }

  void Send(v1::SessionRequest request) {
    MutexLock lock(mu_);
    if (!open_ || closing_) return;  // Its end is near: the next stream sends it.
    outbox_.push_back(std::move(request));
    if (!writing_) WriteNext();
  }

  void Close() {
    MutexLock lock(mu_);
    closing_ = true;
    if (open_ && !writing_) WriteClose();
  }

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    request_ = std::move(outbox_.front());
    outbox_.pop_front();
    stream_->Write(request_, &write_done_);
  }

  void WriteClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    request_.Clear();
    request_.mutable_close();
    stream_->WriteLast(request_, grpc::WriteOptions(), &write_done_);
  }

  void OnStart(bool ok) {
    MutexLock lock(mu_);
    if (!ok) {
      reads_ended_ = true;
      FinishIfIdle();
      return;
    }
    request_.mutable_open()->mutable_client()->set_protocol_version(kProtocolVersion);
    request_.mutable_open()->mutable_client()->set_software_version(kSoftwareVersion);
    if (resumed_ != nullptr) request_.mutable_open()->set_resume_session_id(resumed_->id);
    writing_ = true;
    stream_->Write(request_, &write_done_);
    stream_->Read(&reply_, &read_done_);
  }

  void OnWrite(bool ok) {
    MutexLock lock(mu_);
    writing_ = false;
    if (reads_ended_) {
      FinishIfIdle();
    } else if (ok && closing_ && open_ && !request_.has_close()) {
      WriteClose();
    } else if (ok && open_ && !closing_ && !outbox_.empty()) {
      WriteNext();
    }
  }

  void OnRead(bool ok) {
    if (!ok) {
      MutexLock lock(mu_);
      reads_ended_ = true;
      FinishIfIdle();
      return;
    }
    if (reply_.has_opened()) {
      SessionPtr session = resumed_;
      if (session == nullptr) {
        session = std::make_shared<SessionHandle>();
        session->id = reply_.opened().session_id();
        session->pass = pass_;
        session->lease_ms_max = reply_.opened().lease_ms_max();
        session->boot_id = reply_.opened().hello().boot_id();
        DoorClient* const door = owner_.connection_.door();
        const auto entry = door == nullptr ? nullptr : door->pass();
        if (entry != nullptr && entry->number == pass_) session->entry = entry;
      }
      {
        MutexLock lock(owner_.mu_);
        owner_.heartbeat_ = milliseconds(std::max(1u, reply_.opened().heartbeat_ms()));
        owner_.resume_grace_ = milliseconds(reply_.opened().resume_grace_ms());
      }
      {
        MutexLock lock(mu_);
        open_ = true;
        was_open_ = true;
        if (closing_ && !writing_) WriteClose();
      }
      owner_.StreamOpened(session);
    } else if (reply_.has_completion()) {
      owner_.Completed(reply_.completion().number());
    } else if (reply_.has_drain() && owner_.notices_.draining) {
      owner_.notices_.draining();
    } else if (reply_.has_leases_expired() && owner_.notices_.leases_expired) {
      owner_.notices_.leases_expired(
          static_cast<std::uint64_t>(reply_.leases_expired().leases_size()));
    }
    stream_->Read(&reply_, &read_done_);
  }

  // Both directions are idle: the status is due.
  void FinishIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    open_ = false;
    if (writing_ || finishing_) return;
    finishing_ = true;
    stream_->Finish(&status_, &finish_done_);
  }

  void OnFinish(bool) {
    {
      // Whoever called FinishIfIdle, on the other thread of the queue, may still hold the lock.
      MutexLock lock(mu_);
    }
    owner_.connection_.NoteBootId(context_);
    if (status_.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
      owner_.connection_.PassRefused(pass_);
    }
    const absl::Status status = owner_.connection_.StatusOf(status_);
    stream_.reset();
    channel_.reset();
    Connection& connection = owner_.connection_;
    owner_.StreamEnded(status, was_open_);
    connection.End(&context_);
    delete this;
  }

  ClientSession& owner_;
  SessionPtr resumed_;
  std::uint64_t pass_ = 0;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::SessionRequest, v1::SessionReply>> stream_;
  MemberCompletion<Stream> start_done_{this, &Stream::OnStart};
  MemberCompletion<Stream> write_done_{this, &Stream::OnWrite};
  MemberCompletion<Stream> read_done_{this, &Stream::OnRead};
  MemberCompletion<Stream> finish_done_{this, &Stream::OnFinish};
  grpc::Status status_;
  v1::SessionReply reply_;  // Of the read in progress.
  bool was_open_ = false;   // Used by reads, then by OnFinish.

  Mutex mu_;
  v1::SessionRequest request_ ABSL_GUARDED_BY(mu_);  // Of the write in progress.
  std::deque<v1::SessionRequest> outbox_ ABSL_GUARDED_BY(mu_);
  std::uint64_t heartbeats_ ABSL_GUARDED_BY(mu_) = 0;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool reads_ended_ ABSL_GUARDED_BY(mu_) = false;
  bool finishing_ ABSL_GUARDED_BY(mu_) = false;
};

SessionPtr ClientSession::current() {
  MutexLock lock(mu_);
  return session_;
}

void ClientSession::Ensure(Deadline deadline, Opened done) {
  SessionPtr session;
  {
    MutexLock lock(mu_);
    if (session_ != nullptr && !session_->ended.load(std::memory_order_acquire)) {
      session = session_;
    } else if (!closed_) {
      // A stream of a session that ended makes way.
      if (session_ != nullptr && stream_ != nullptr) stream_->Cancel();
      session_ = nullptr;
      waiters_.push_back({deadline, [of = CurrentRequest(),
                                     done = std::move(done)](absl::StatusOr<SessionPtr> opened) {
                            const RequestScope scope(of);
                            done(std::move(opened));
                          }});
      if (stream_ == nullptr) StartStream();
      const auto left =
          std::chrono::duration_cast<milliseconds>(deadline - std::chrono::system_clock::now());
      SetTimer(steady_clock::now() + std::clamp(left, milliseconds(0), kOpenMax));
      return;
    }
  }
  if (session != nullptr) {
    done(std::move(session));
  } else {
    done(absl::CancelledError("the client is being destroyed"));
  }
}

void ClientSession::StartStream() {
  stream_ = new Stream(*this);
  stream_open_ = false;
  stream_is_fresh_ = session_ == nullptr;
  opening_since_ = steady_clock::now();
  SetTimer(opening_since_ + kOpenMax);
  // Without the lock: it may fail at once, and then tells us.
  connection_.Post([this, stream = stream_, resume = session_] { stream->Start(resume); });
}

void ClientSession::StreamOpened(const SessionPtr& session) {
  std::vector<Waiter> opened;
  Answered answered;
  {
    MutexLock lock(mu_);
    stream_open_ = true;
    pause_ = milliseconds(0);
    session_ = session;
    opened.swap(waiters_);
    SendCancels(&answered);
    next_heartbeat_ = steady_clock::now() + heartbeat_;
    SetTimer(next_heartbeat_);
  }
  for (const Waiter& waiter : opened) waiter.done(session);
  for (const auto& [done, status] : answered) done(status);
}

void ClientSession::StreamEnded(const absl::Status& status, bool opened) {
  std::vector<Waiter> failed;
  SessionPtr ended;
  {
    MutexLock lock(mu_);
    const bool fresh_failed = stream_is_fresh_ && !opened;
    stream_ = nullptr;
    stream_open_ = false;
    changed_.NotifyAll();
    const auto now = steady_clock::now();
    if (opened) broken_since_ = now;
    for (auto& [number, cancel] : cancels_) cancel.sent = false;
    if (session_ != nullptr &&
        (closed_ || status.ok() || absl::IsNotFound(status) || absl::IsAborted(status) ||
         (session_->pass == 0 && now - broken_since_ > resume_grace_))) {
      ended = std::move(session_);
      session_ = nullptr;
    }
    if (session_ != nullptr) {
      pause_ = std::clamp(2 * pause_, kPauseMin, kPauseMax);
      next_attempt_ = now + pause_;
      SetTimer(next_attempt_);
    } else if (!waiters_.empty() && !fresh_failed && !closed_) {
      StartStream();  // They want a new one; this was the end of an old one.
    } else {
      failed.swap(waiters_);
      if (!cancels_.empty()) {  // Ask another time.
        pause_ = std::clamp(2 * pause_, kPauseMin, kPauseMax);
        next_attempt_ = now + pause_;
        SetTimer(next_attempt_);
      }
    }
  }
  if (ended != nullptr && !ended->ended.exchange(true) && notices_.ended) notices_.ended();
  for (const Waiter& waiter : failed) {
    waiter.done(status.ok() ? absl::UnavailableError("the session was closed") : status);
  }
}

void ClientSession::Ended(const SessionPtr& session) {
  {
    MutexLock lock(mu_);
    if (session_ == session) {
      session_ = nullptr;
      if (stream_ != nullptr) stream_->Cancel();
    }
  }
  if (!session->ended.exchange(true) && notices_.ended) notices_.ended();
}

void ClientSession::CancelStores(const SessionPtr& of, std::vector<std::uint64_t> stores,
                                 Deadline deadline, std::function<void(absl::Status)> done) {
  Answered answered;
  {
    MutexLock lock(mu_);
    if (closed_) {
      answered.emplace_back(std::move(done), absl::CancelledError("the client is being destroyed"));
    } else {
      cancels_.emplace(next_cancel_++, Cancel{of, std::move(stores), deadline, std::move(done)});
      SendCancels(&answered);
      if (stream_ == nullptr && session_ == nullptr && !cancels_.empty()) StartStream();
      if (!cancels_.empty()) SetTimer(steady_clock::now() + kDeathCheck);
    }
  }
  for (const auto& [answer, status] : answered) answer(status);
}

void ClientSession::SendCancels(Answered* answered) {
  const auto wall = std::chrono::system_clock::now();
  for (auto it = cancels_.begin(); it != cancels_.end();) {
    Cancel& cancel = it->second;
    // Two daemons never serve one socket at the same time.
    const bool replaced =
        session_ != nullptr && stream_open_ && session_->boot_id != cancel.of->boot_id;
    const bool gone = replaced || (cancel.of->entry != nullptr && cancel.of->entry->DaemonIsGone());
    if (gone || cancel.deadline <= wall) {
      answered->emplace_back(
          std::move(cancel.done),
          gone ? absl::OkStatus()
               : absl::DeadlineExceededError("the daemon did not say that nobody reads the pages"));
      it = cancels_.erase(it);
      continue;
    }
    if (!cancel.sent && stream_ != nullptr && stream_open_ && session_ != nullptr) {
      v1::SessionRequest request;
      request.mutable_cancel()->set_number(it->first);
      if (cancel.of->id != session_->id) request.mutable_cancel()->set_session_id(cancel.of->id);
      request.mutable_cancel()->mutable_stores()->Add(cancel.stores.begin(), cancel.stores.end());
      stream_->Send(std::move(request));
      cancel.sent = true;
    }
    ++it;
  }
}

void ClientSession::Completed(std::uint64_t number) {
  std::function<void(absl::Status)> done;
  {
    MutexLock lock(mu_);
    const auto it = cancels_.find(number);
    if (it == cancels_.end()) return;  // It did not wait that long.
    done = std::move(it->second.done);
    cancels_.erase(it);
  }
  done(absl::OkStatus());
}

void ClientSession::PassLost(std::uint64_t pass) {
  const SessionPtr session = current();
  if (session != nullptr && session->pass == pass) Ended(session);
}

void ClientSession::Close(milliseconds wait) {
  SessionPtr session;
  std::map<std::uint64_t, Cancel> cancels;
  const auto give_up = steady_clock::now() + wait;
  {
    MutexLock lock(mu_);
    closed_ = true;
    session = session_;
    cancels.swap(cancels_);
    if (stream_ != nullptr && session != nullptr && session->pass == 0) {
      stream_->Close();
      while (stream_ != nullptr && steady_clock::now() < give_up) {
        changed_.WaitFor(mu_, milliseconds(10));
      }
    }
  }
  if (session != nullptr) session->ended.store(true, std::memory_order_release);
  for (const auto& [number, cancel] : cancels) {
    cancel.done(absl::CancelledError("the client is being destroyed"));
  }
}

void ClientSession::SetTimer(steady_clock::time_point when) {
  if (timer_set_ && timer_at_ <= when) return;
  timer_set_ = true;
  timer_at_ = when;
  connection_.PostAt(when, [this] { OnTimer(); });
}

void ClientSession::OnTimer() {
  std::vector<Waiter> late;
  Answered answered;
  {
    MutexLock lock(mu_);
    const auto now = steady_clock::now();
    if (timer_at_ <= now) timer_set_ = false;
    if (closed_) return;
    const auto wall = std::chrono::system_clock::now();
    const auto first_late = std::stable_partition(
        waiters_.begin(), waiters_.end(), [wall](const Waiter& w) { return w.deadline > wall; });
    std::move(first_late, waiters_.end(), std::back_inserter(late));
    waiters_.erase(first_late, waiters_.end());
    if (stream_ != nullptr && stream_open_) {
      if (now >= next_heartbeat_) {
        stream_->Heartbeat();
        next_heartbeat_ = now + heartbeat_;
      }
      SetTimer(next_heartbeat_);
    } else if (stream_ != nullptr) {
      if (now >= opening_since_ + kOpenMax) stream_->Cancel();
      SetTimer(std::max(now + milliseconds(100), opening_since_ + kOpenMax));
    } else if (session_ != nullptr) {
      if (now >= next_attempt_) StartStream();
      SetTimer(std::max(now + milliseconds(1), next_attempt_));
    }
    SendCancels(&answered);
    if (!cancels_.empty()) {
      if (stream_ == nullptr && session_ == nullptr && now >= next_attempt_) StartStream();
      SetTimer(now + kDeathCheck);
    }
    for (const Waiter& waiter : waiters_) {
      const auto left = std::chrono::duration_cast<milliseconds>(waiter.deadline - wall);
      SetTimer(now + std::clamp(left, milliseconds(1), kOpenMax));
    }
  }
  for (const auto& [done, status] : answered) done(status);
  for (const Waiter& waiter : late) {
    waiter.done(absl::DeadlineExceededError("the daemon opened no session in time"));
  }
}

}  // namespace kvmill
