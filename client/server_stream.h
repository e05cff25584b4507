// Calls with one request and a stream of replies. Internal to client/.
#ifndef KVMILL_CLIENT_SERVER_STREAM_H_
#define KVMILL_CLIENT_SERVER_STREAM_H_

#include <grpcpp/support/async_stream.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"

namespace kvmill {

// Made with new; deletes itself after Ended. Replies come one at a time, on the connection's
// threads.
template <typename Reply>
class ServerStream {
 public:
  void Start(Connection::Deadline deadline) {
    connection_.Admit(&context_, deadline, [this](const Connection::Admission& admission) {
      if (!admission.status.ok()) {
        Ended(admission.status);
        delete this;
        return;
      }
      pass_ = admission.pass;
      channel_ = connection_.channel();
      reader_ = Prepare(*channel_, &context_, connection_.queue());
      reader_->StartCall(&start_done_);
    });
  }

 protected:
  using Reader = std::unique_ptr<grpc::ClientAsyncReader<Reply>>;

  explicit ServerStream(Connection& connection) : connection_(connection) {}
  virtual ~ServerStream() = default;

  // Of a stub of the channel.
  virtual Reader Prepare(Channel& channel, grpc::ClientContext* context,
                         grpc::CompletionQueue* queue) = 0;
  // True: the next one is read; false: not before Resume, which may be called before this returns.
  // An error: no more is read, the call is cancelled, and this is what it ended with.
  virtual absl::StatusOr<bool> Take(const Reply& reply) = 0;
  virtual void Ended(const absl::Status& status) = 0;

  // From any thread, not after Ended began.
  void TryCancel() { context_.TryCancel(); }
  // Once for each time that Take said no, from any thread. Ended does not come before.
  void Resume() { reader_->Read(&reply_, &read_done_); }
  // In Ended: the daemon did not know the pass, of its last incarnation; the next call has another.
  bool pass_refused() const { return pass_refused_; }

 private:
  void OnStart(bool ok) {
    if (ok) {
      reader_->Read(&reply_, &read_done_);
    } else {
      reader_->Finish(&grpc_status_, &finish_done_);
    }
  }

  void OnRead(bool ok) {
    if (ok) {
      const absl::StatusOr<bool> more = Take(reply_);
      if (more.ok()) {
        if (*more) reader_->Read(&reply_, &read_done_);
        return;  // If not, who resumes may have done so, and this be gone.
      }
      failed_ = more.status();
      context_.TryCancel();
    }
    reader_->Finish(&grpc_status_, &finish_done_);
  }

  void OnFinish(bool) {
    connection_.NoteBootId(context_);
    pass_refused_ = grpc_status_.error_code() == grpc::StatusCode::UNAUTHENTICATED &&
                    connection_.PassRefused(pass_);
    reader_.reset();
    channel_.reset();
    Ended(failed_.ok() ? connection_.StatusOf(grpc_status_, context_) : failed_);
    connection_.End(&context_);
    delete this;
  }

  Connection& connection_;
  std::uint64_t pass_ = 0;
  bool pass_refused_ = false;
  grpc::ClientContext context_;
  ChannelPtr channel_;
  Reader reader_;
  MemberCompletion<ServerStream> start_done_{this, &ServerStream::OnStart};
  MemberCompletion<ServerStream> read_done_{this, &ServerStream::OnRead};
  MemberCompletion<ServerStream> finish_done_{this, &ServerStream::OnFinish};
  Reply reply_;
  absl::Status failed_;
  grpc::Status grpc_status_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_SERVER_STREAM_H_
