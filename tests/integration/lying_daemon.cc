#include "tests/integration/lying_daemon.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/door_protocol.h"
#include "tests/integration/raw_call.h"

namespace kvmill::testing {
namespace {

// One call that is passed on. Goes with the last of its two ends.
class Relay {
 public:
  Relay(LyingDaemon& liar, grpc::GenericCallbackServerContext* call)
      : liar_(liar),
        call_(call),
        method_(call->method()),
        stub_(liar.real(call->client_metadata().count(kDoorTokenMetadata) != 0)),
        down_(*this),
        up_(*this) {
    const auto& metadata = call->client_metadata();
    const auto token = metadata.find(kDoorTokenMetadata);
    if (token != metadata.end()) {
      context_.AddMetadata(kDoorTokenMetadata, std::string(token->second.data(),  //
                                                           token->second.size()));
    }
    context_.set_deadline(call->deadline());
    stub_.PrepareBidiStreamingCall(&context_, method_, {}, &up_);
    // One for writes, one for reads, which the other end starts.
    up_.AddMultipleHolds(2);
    up_.StartRead(&reply_);
    up_.StartCall();
    down_.StartRead(&request_);
  }
  grpc::ServerGenericBidiReactor* down() { return &down_; }

 private:
  class Down final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Down(Relay& relay) : relay_(relay) {}
    void OnReadDone(bool ok) override { relay_.Requested(ok); }
    void OnWriteDone(bool) override { relay_.WriteNext(); }
    void OnCancel() override { relay_.Cancelled(); }
    void OnDone() override { relay_.Drop(); }

   private:
    Relay& relay_;
  };
  class Up final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit Up(Relay& relay) : relay_(relay) {}
    void OnReadInitialMetadataDone(bool ok) override {
      if (ok) relay_.Met();
    }
    void OnWriteDone(bool ok) override { relay_.PassedOn(ok); }
    void OnReadDone(bool ok) override { relay_.Replied(ok); }
    void OnDone(const grpc::Status& status) override { relay_.Ended(status); }

   private:
    Relay& relay_;
  };

  // Also of a call that is answered with an error alone.
  void Met() {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    if (!cancelled_) PassMetadata();
  }
  void Requested(bool ok) {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    if (writes_over_) return;
    if (ok) return up_.StartWrite(&request_);
    up_.StartWritesDone();
    EndWrites();
  }
  void PassedOn(bool ok) {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    if (writes_over_) return;
    ok ? down_.StartRead(&request_) : EndWrites();
  }
  void EndWrites() {
    writes_over_ = true;
    up_.RemoveHold();
  }
  void Replied(bool ok) {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    if (!ok) {
      if (!writes_over_) EndWrites();
      up_.RemoveHold();
      return;
    }
    PassMetadata();
    for (std::string& lie : liar_.InsteadOf(method_, TextOf(reply_))) {
      replies_.push_back(std::move(lie));
    }
    WriteNext();
  }
  void WriteNext() {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    if (replies_.empty()) return up_.StartRead(&reply_);
    lie_ = BufferOf(replies_.front());
    replies_.pop_front();
    down_.StartWrite(&lie_);
  }
  void Cancelled() {
    std::lock_guard<std::recursive_mutex> lock(mu_);
    context_.TryCancel();
    cancelled_ = true;
    if (std::exchange(silent_, false)) down_.Finish(grpc::Status::CANCELLED);
  }
  void Ended(grpc::Status status) {
    {
      std::lock_guard<std::recursive_mutex> lock(mu_);
      if (liar_.InsteadOf(method_, &status) || cancelled_) {
        down_.Finish(status);
      } else {
        silent_ = true;
      }
    }
    Drop();
  }
  void Drop() {
    if (ends_.fetch_sub(1) == 1) delete this;
  }

  // Of the daemon: who answers is no lie. Before anything else is said.
  void PassMetadata() {
    if (std::exchange(metadata_passed_, true)) return;
    for (const auto& [name, value] : context_.GetServerInitialMetadata()) {
      call_->AddInitialMetadata(std::string(name.data(), name.size()),
                                std::string(value.data(), value.size()));
    }
  }

  LyingDaemon& liar_;
  grpc::GenericCallbackServerContext* const call_;
  const std::string method_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  Down down_;
  Up up_;
  std::atomic<int> ends_{2};
  std::recursive_mutex mu_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer reply_;
  grpc::ByteBuffer lie_;
  std::deque<std::string> replies_;
  bool writes_over_ = false;
  bool metadata_passed_ = false;
  bool cancelled_ = false;
  bool silent_ = false;
};

}  // namespace

LyingDaemon::LyingDaemon(const std::string& real_socket, const std::string& real_tcp,
                         const std::string& socket, std::uint64_t seed)
    : real_local_(RawChannel("unix:" + real_socket)),
      real_tcp_(RawChannel(real_tcp)),
      mutator_(seed) {
  Serve(real_socket, socket);
}

LyingDaemon::LyingDaemon(const std::string& real_socket, const std::string& real_tcp,
                         const std::string& socket, Script script)
    : real_local_(RawChannel("unix:" + real_socket)),
      real_tcp_(RawChannel(real_tcp)),
      script_(std::move(script)),
      mutator_(1) {
  Serve(real_socket, socket);
}

void LyingDaemon::Serve(const std::string& real_socket, const std::string& socket) {
  EXPECT_EQ(symlink(DoorPath(real_socket).c_str(), DoorPath(socket).c_str()), 0);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(this);
  server_ = builder.BuildAndStart();
  EXPECT_NE(server_, nullptr);
  tcp_address_ = absl::StrCat("127.0.0.1:", port);
}

LyingDaemon::~LyingDaemon() { server_->Shutdown(std::chrono::system_clock::now()); }

grpc::ServerGenericBidiReactor* LyingDaemon::CreateReactor(
    grpc::GenericCallbackServerContext* call) {
  return (new Relay(*this, call))->down();  // Deletes itself.
}

std::vector<std::string> LyingDaemon::InsteadOf(const std::string& method, std::string reply) {
  MutexLock lock(mu_);
  if (script_ != nullptr) return script_(method, std::move(reply));
  if (!mutator_.OneIn(4)) return {std::move(reply)};
  lies_.fetch_add(1);
  switch (mutator_.Below(12)) {
    case 0:
      return {};
    case 1:
      return {reply, reply};
    case 2:
      return {mutator_.Damage(std::move(reply))};
    case 3: {  // One bit: of a large message mostly of its bulk.
      if (!reply.empty()) reply[mutator_.Below(reply.size())] ^= 4;
      return {std::move(reply)};
    }
    default:
      break;
  }
  const auto* described = google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(
      absl::StrReplaceAll(method.substr(1), {{"/", "."}}));
  std::unique_ptr<google::protobuf::Message> message(
      google::protobuf::MessageFactory::generated_factory()
          ->GetPrototype(described->output_type())
          ->New());
  if (message->ParseFromString(reply)) {
    if (mutator_.OneIn(10)) {
      message->Clear();
      mutator_.Fill(message.get());
    } else {
      mutator_.Mutate(message.get(), 1 + static_cast<int>(mutator_.Below(3)));
    }
  }
  return {message->SerializeAsString()};
}

void LyingDaemon::EndWith(std::string method, grpc::Status status) {
  MutexLock lock(mu_);
  ends_[std::move(method)] = std::move(status);
}

bool LyingDaemon::InsteadOf(const std::string& method, grpc::Status* status) {
  MutexLock lock(mu_);
  if (const auto end = ends_.find(method); end != ends_.end()) *status = end->second;
  if (script_ != nullptr) return true;
  if (mutator_.OneIn(30)) {
    lies_.fetch_add(1);
    *status = grpc::Status(static_cast<grpc::StatusCode>(mutator_.Below(18)),
                           mutator_.OneIn(3) ? "" : "a lie");
  }
  return !mutator_.OneIn(100);
}

}  // namespace kvmill::testing
