// One call of the registry: what it sends, how it is tried at a server, what becomes of the answer.
#ifndef KVMILL_SERVICE_ETCD_ETCD_CALL_H_
#define KVMILL_SERVICE_ETCD_ETCD_CALL_H_

#include <grpcpp/client_context.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "service/cluster/loop.h"
#include "service/cluster/registry.h"
#include "service/etcd/etcd_servers.h"
#include "service/etcd/etcd_stream.h"

namespace kvmill {

// On the loop, but for what gRPC does between Try and `tried`: meanwhile it keeps the call.
class EtcdCall {
 public:
  using Tried = std::function<void(const grpc::Status&)>;  // Once, on any thread.
  // Once, after `tried`, when gRPC holds nothing of the try any more. On any thread.
  using Ended = std::function<void()>;

  virtual ~EtcdCall() = default;
  virtual void Try(EtcdServer& server, std::shared_ptr<grpc::ClientContext> context, Tried tried,
                   Ended ended) = 0;
  // After a try that went well: what the caller is told, which may be an error all the same.
  virtual void Answer(const std::string& server) = 0;
  virtual void Fail(const absl::Status& why) = 0;
  // The caller is told nothing.
  virtual void Drop() = 0;

  std::int64_t deadline_nanos = 0;
  bool wants_token = true;

  // Of the registry.
  Loop::TimerId timer = 0;
  std::size_t server_index = 0;
  std::size_t tries_left = 0;
  std::uint64_t tries = 0;
  bool authenticated_again = false;
  std::string token;                                 // That the try carries.
  std::shared_ptr<grpc::ClientContext> try_context;  // In flight.
};

// `Answered` makes what the caller gets of a response and the name of the server.
template <typename AnswerType, typename Request, typename Response>
class TypedEtcdCall : public EtcdCall {
 public:
  using Answered = std::function<absl::StatusOr<AnswerType>(const Response&, const std::string&)>;

  void Answer(const std::string& server_name) override {
    const auto told = std::exchange(done, nullptr);
    told(answered(response, server_name));
  }
  void Fail(const absl::Status& why) override {
    const auto told = std::exchange(done, nullptr);
    told(why);
  }
  void Drop() override { done = nullptr; }

  Request request;
  Response response;
  Answered answered;
  Registry::Done<AnswerType> done;
};

// A method with one request and one response.
template <typename AnswerType, typename Request, typename Response>
class UnaryEtcdCall final : public TypedEtcdCall<AnswerType, Request, Response> {
 public:
  using Method = std::function<void(EtcdServer&, grpc::ClientContext*, const Request*, Response*,
                                    std::function<void(grpc::Status)>)>;

  void Try(EtcdServer& server, std::shared_ptr<grpc::ClientContext> context, EtcdCall::Tried tried,
           EtcdCall::Ended ended) override {
    grpc::ClientContext* const call = context.get();
    method(server, call, &this->request, &this->response,
           [context = std::move(context), tried = std::move(tried),
            ended = std::move(ended)](const grpc::Status& status) mutable {
             tried(status);
             // It refers to the channel, which must not end on the thread that gRPC joins then.
             context = nullptr;
             ended();
           });
  }

  Method method;
};

// LeaseKeepAlive is a stream; one renewal is one request and one response on a stream of its own,
// which fails over and times out as every other call.
template <typename AnswerType>
class KeepAliveEtcdCall final
    : public TypedEtcdCall<AnswerType, etcdserverpb::LeaseKeepAliveRequest,
                           etcdserverpb::LeaseKeepAliveResponse> {
 public:
  using Stream =
      EtcdStream<etcdserverpb::LeaseKeepAliveRequest, etcdserverpb::LeaseKeepAliveResponse>;

  void Try(EtcdServer& server, std::shared_ptr<grpc::ClientContext> context, EtcdCall::Tried tried,
           EtcdCall::Ended ended) override {
    // What the callbacks, which gRPC runs one after the other, share.
    struct State {
      std::weak_ptr<Stream> stream;
      bool answered = false;
    };
    const auto state = std::make_shared<State>();
    typename Stream::Calls calls;
    calls.read = [this, state, tried](bool ok) {
      const std::shared_ptr<Stream> stream = state->stream.lock();
      if (ok) {
        state->answered = true;
        this->response = stream->response();
        tried(grpc::Status::OK);
      }
      stream->Release();
    };
    // Half-closed the server ends the stream without an entry in its log.
    calls.wrote = [state](bool ok) {
      const std::shared_ptr<Stream> stream = state->stream.lock();
      if (ok && stream != nullptr) stream->StartWritesDone();
    };
    calls.ended = [state, tried, ended = std::move(ended)](const grpc::Status& status) {
      if (!state->answered) {
        tried(!status.ok()
                  ? status
                  : grpc::Status(grpc::StatusCode::UNAVAILABLE, "no answer on the stream"));
      }
      ended();
    };
    const std::shared_ptr<Stream> stream = Stream::Begin(
        std::move(context), std::move(calls), [&server](grpc::ClientContext* call, auto* reactor) {
          server.lease->async()->LeaseKeepAlive(call, reactor);
        });
    state->stream = stream;
    stream->Write(this->request);
    stream->Read();
  }
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_CALL_H_
