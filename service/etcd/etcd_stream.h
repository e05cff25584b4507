// A bidirectional gRPC stream that is driven from the loop.
#ifndef KVMILL_SERVICE_ETCD_ETCD_STREAM_H_
#define KVMILL_SERVICE_ETCD_ETCD_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <functional>
#include <memory>
#include <utility>

namespace kvmill {

// The callbacks run on gRPC's threads. One read and one write at a time: the next one may be
// started once the last was reported. `ended` comes once, after Release and when nothing is in
// progress; the stream keeps itself alive until then, the context not quite, and the callbacks are
// destroyed after it.
template <typename Request, typename Response>
class EtcdStream final : public grpc::ClientBidiReactor<Request, Response> {
 public:
  struct Calls {
    std::function<void(bool ok)> read;   // Not ok: the stream is over.
    std::function<void(bool ok)> wrote;  // The same.
    std::function<void(const grpc::Status&)> ended;
  };

  // `start` gives the reactor to the stub.
  template <typename Start>
  static std::shared_ptr<EtcdStream> Begin(std::shared_ptr<grpc::ClientContext> context,
                                           Calls calls, Start start) {
    std::shared_ptr<EtcdStream> stream(new EtcdStream);
    stream->self_ = stream;
    stream->context_ = std::move(context);
    stream->calls_ = std::move(calls);
    start(stream->context_.get(), stream.get());
    stream->AddHold();
    stream->StartCall();
    return stream;
  }

  void Read() { this->StartRead(&response_); }
  const Response& response() const { return response_; }  // Of the last read.
  void Write(Request request) {
    request_ = std::move(request);
    this->StartWrite(&request_);
  }
  // Nothing is started any more. Idempotent.
  void Release() {
    if (!std::exchange(released_, true)) this->RemoveHold();
  }
  void Cancel() {
    if (released_) return;  // It is over, or ends by itself.
    context_->TryCancel();
    Release();
  }

  void OnReadDone(bool ok) override { calls_.read(ok); }
  void OnWriteDone(bool ok) override { calls_.wrote(ok); }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<EtcdStream> self = std::move(self_);
    const Calls calls = std::move(calls_);
    // It refers to the channel, which must not end on the thread that gRPC joins when it does.
    context_ = nullptr;
    calls.ended(status);
  }

 private:
  EtcdStream() = default;

  std::shared_ptr<EtcdStream> self_;
  std::shared_ptr<grpc::ClientContext> context_;
  Calls calls_;
  Request request_;
  Response response_;
  bool released_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_STREAM_H_
