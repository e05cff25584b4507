#include "client/transport/link.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/mutex.h"

namespace kvmill {

class Link::Impl : public std::enable_shared_from_this<Link::Impl> {
 public:
  Impl(Transport* transport, AskForOffer ask, const Options& options)
      : transport_(transport), ask_(std::move(ask)), options_(options), random_(options.seed) {}

  void Start(Call call) {
    ConnectionPtr connection;
    absl::Status refusal;
    bool attempt = false;
    {
      const MutexLock lock(mu_);
      connection = connection_;
      if (connection == nullptr) {
        const bool resting = !state_.connecting && state_.failures_in_a_row > 0 &&
                             transport_->NowNanos() < state_.next_attempt_nanos;
        if (stopped_ || resting) {
          refusal =
              absl::UnavailableError(absl::StrCat("no connection: ", state_.last_error.message()));
        } else if (waiting_.size() >= options_.calls_max) {
          refusal = absl::UnavailableError(
              absl::StrCat(waiting_.size(), " calls wait for the connection already"));
        } else {
          waiting_.push_back(std::move(call));
          attempt = BeginAttempt();
        }
      }
    }
    if (connection != nullptr) {
      connection->Start(std::move(call));
    } else if (!refusal.ok()) {
      call.done(refusal);
    } else if (attempt) {
      Attempt();
    }
  }

  void Stop() {
    std::vector<Call> waiting;
    ConnectionPtr connection;
    {
      const MutexLock lock(mu_);
      stopped_ = true;
      waiting.swap(waiting_);
      connection = std::move(connection_);
      connection_ = nullptr;
      state_.connected = false;
    }
    if (connection != nullptr) connection->Close();
    for (Call& call : waiting) call.done(absl::CancelledError("the link is being destroyed"));
  }

  ConnectionPtr connection() const {
    const MutexLock lock(mu_);
    return connection_;
  }
  State state() const {
    const MutexLock lock(mu_);
    return state_;
  }

 private:
  bool BeginAttempt() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (state_.connecting || stopped_) return false;
    state_.connecting = true;
    ++state_.attempts;
    return true;
  }

  void Attempt() {
    ask_([self = shared_from_this()](absl::StatusOr<Offer> offer) {
      if (!offer.ok()) return self->Failed(offer.status());
      {
        const MutexLock lock(self->mu_);
        if (self->stopped_) return;  // The transport may be gone.
      }
      self->transport_->Connect(*std::move(offer),
                                {.done =
                                     [self](absl::StatusOr<ConnectionPtr> connection) {
                                       if (connection.ok()) {
                                         self->Connected(*std::move(connection));
                                       } else {
                                         self->Failed(connection.status());
                                       }
                                     },
                                 .closed = [self](const absl::Status& why) { self->Closed(why); }});
    });
  }

  void Connected(ConnectionPtr connection) {
    std::vector<Call> waiting;
    bool close = false;
    {
      const MutexLock lock(mu_);
      close = stopped_;
      state_.connecting = false;
      if (!close) {
        connection_ = connection;
        state_.connected = true;
        state_.failures_in_a_row = 0;
        waiting.swap(waiting_);
      }
    }
    if (close) return connection->Close();
    for (Call& call : waiting) connection->Start(std::move(call));
  }

  void Closed(const absl::Status& why) {
    const MutexLock lock(mu_);
    connection_ = nullptr;
    state_.connected = false;
    state_.last_error = why;  // The next call connects at once: this is the first failure.
  }

  void Failed(const absl::Status& why) {
    std::vector<Call> waiting;
    {
      const MutexLock lock(mu_);
      state_.connecting = false;
      state_.last_error = why;
      const std::uint64_t doublings = std::min<std::uint64_t>(state_.failures_in_a_row, 30);
      ++state_.failures_in_a_row;
      const std::int64_t nanos =
          options_.backoff_min_nanos > options_.backoff_max_nanos >> doublings
              ? options_.backoff_max_nanos
              : options_.backoff_min_nanos << doublings;
      // Many peers of one that failed must not return at the same moment.
      const std::int64_t scattered =
          std::uniform_int_distribution<std::int64_t>(nanos - nanos / 2, nanos)(random_);
      if (!stopped_) state_.next_attempt_nanos = transport_->NowNanos() + scattered;
      waiting.swap(waiting_);
    }
    for (Call& call : waiting) {
      call.done(absl::UnavailableError(absl::StrCat("no connection: ", why.message())));
    }
  }

  Transport* const transport_;
  const AskForOffer ask_;
  const Options options_;
  mutable Mutex mu_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  ConnectionPtr connection_ ABSL_GUARDED_BY(mu_);
  State state_ ABSL_GUARDED_BY(mu_);
  std::vector<Call> waiting_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

Link::Link(Transport* transport, AskForOffer ask, const Options& options)
    : impl_(std::make_shared<Impl>(transport, std::move(ask), options)) {}

Link::~Link() { impl_->Stop(); }

void Link::Start(Call call) { impl_->Start(std::move(call)); }

ConnectionPtr Link::connection() const { return impl_->connection(); }

Link::State Link::state() const { return impl_->state(); }

}  // namespace kvmill
