#include "tests/bench/grpc_chain.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmill/v1/peer.grpc.pb.h"

namespace kvmill::testing {
namespace {

constexpr int kRuns = 8, kRunBlocks = 32;
constexpr char kArgument[] = "grpc-chain";
constexpr std::chrono::milliseconds kDeadline{2000};

std::string KeyBytes(int i) {
  std::string key = absl::StrCat("block ", i);
  key.resize(32, '.');
  return key;
}

// A home's part of the prompt.
v1::LocateRequest RequestFor(int runs) {
  v1::LocateRequest request;
  request.set_incarnation(std::string(16, 'i'));
  request.set_fingerprint(std::string(32, 'f'));
  request.set_asker("n1");
  for (int r = 0; r < runs; ++r) {
    v1::LocateRun* run = request.add_runs();
    run->set_anchor(KeyBytes(r * kRunBlocks));
    for (int i = 0; i < kRunBlocks; ++i) run->add_keys(KeyBytes(r * kRunBlocks + i));
  }
  return request;
}

class Homes final : public v1::Peer::CallbackService {
  grpc::ServerUnaryReactor* Locate(grpc::CallbackServerContext* call,
                                   const v1::LocateRequest* request,
                                   v1::LocateReply* reply) override {
    for (int r = 0; r < request->runs_size(); ++r) {
      v1::PeerPointer* pointer = reply->add_runs()->add_pointers();
      pointer->set_holder("n0");
      pointer->set_incarnation(request->incarnation());
      pointer->set_blocks(~std::uint32_t{0});
    }
    grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

class Asked final : public v1::Cache::CallbackService {
 public:
  explicit Asked(const std::vector<std::string>& homes) {
    const int count = static_cast<int>(homes.size());
    for (int i = 0; i < count; ++i) {
      stubs_.push_back(v1::Peer::NewStub(grpc::CreateChannel(homes[static_cast<std::size_t>(i)],
                                                             grpc::InsecureChannelCredentials())));
      requests_.push_back(RequestFor(kRuns * (i + 1) / count - kRuns * i / count));
    }
    for (int i = 0; i < kRuns * kRunBlocks; ++i) answer_.add_tiers(v1::TIER_PEER);
    answer_.set_hit_blocks(kRuns * kRunBlocks);
  }

 private:
  // Of one call: the last answer of a home is the answer.
  struct Chain {
    struct Part {
      grpc::ClientContext context;
      v1::LocateReply reply;
    };
    explicit Chain(std::size_t homes) : parts(homes), open(homes) {}
    std::vector<Part> parts;
    std::atomic<std::size_t> open;
    std::atomic<bool> failed{false};
  };

  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* call,
                                   const v1::LookupRequest* request,
                                   v1::LookupReply* reply) override {
    grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
    *reply = answer_;
    if (request->elsewhere().hint().empty()) {
      reactor->Finish(grpc::Status::OK);
      return reactor;
    }
    const auto chain = std::make_shared<Chain>(stubs_.size());
    for (std::size_t i = 0; i < stubs_.size(); ++i) {
      Chain::Part& part = chain->parts[i];
      part.context.set_deadline(std::chrono::system_clock::now() + kDeadline);
      stubs_[i]->async()->Locate(
          &part.context, &requests_[i], &part.reply, [chain, reactor](const grpc::Status& status) {
            if (!status.ok()) chain->failed = true;
            if (--chain->open > 0) return;
            reactor->Finish(
                chain->failed ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "a home did not answer")
                              : grpc::Status::OK);
          });
    }
    return reactor;
  }

  std::vector<std::unique_ptr<v1::Peer::Stub>> stubs_;
  std::vector<v1::LocateRequest> requests_;
  v1::LookupReply answer_;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "grpc_chain: %s\n", what.c_str());
  std::exit(1);
}

// "PROGRAM grpc-chain ADDRESS HOME...": without homes it is one.
[[noreturn]] void Serve(const std::string& address, const std::vector<std::string>& homes) {
  Homes home;
  Asked asked(homes);
  grpc::ServerBuilder builder;
  int port = -1;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&home);
  builder.RegisterService(&asked);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) Fail("cannot listen on " + address);
  std::printf("{\"ready\":true,\"port\":%d}\n", port);
  std::fflush(stdout);
  server->Wait();
  std::exit(0);
}

}  // namespace

void GrpcChain::ServeIfAsked(int argc, char** argv) {
  if (argc < 3 || std::strcmp(argv[1], kArgument) != 0) return;
  Serve(argv[2], std::vector<std::string>(argv + 3, argv + argc));
}

GrpcChain::GrpcChain(std::size_t homes) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self));
  if (length <= 0) Fail("no /proc/self/exe");
  const std::string program(self, static_cast<std::size_t>(length));
  const auto start = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), kArgument);
    processes_.push_back(std::make_unique<DaemonProcess>(program, arguments));
    const nlohmann::json ready = processes_.back()->WaitReady();
    if (ready.is_null()) Fail(processes_.back()->standard_error());
    return ready["port"].get<int>();
  };
  const std::string address = "unix:" + (directory_ / "chain.sock");
  std::vector<std::string> asked = {address};
  for (std::size_t i = 0; i < homes; ++i) {
    asked.push_back(absl::StrCat("127.0.0.1:", start({"127.0.0.1:0"})));
  }
  start(asked);
  stub_ = v1::Cache::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

GrpcChain::~GrpcChain() = default;

std::vector<pid_t> GrpcChain::processes() const {
  std::vector<pid_t> pids;
  for (const auto& process : processes_) pids.push_back(process->pid());
  return pids;
}

void GrpcChain::Lookup(bool chain) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::LookupRequest request;
  request.mutable_namespace_()->set_name("bench");
  for (int i = 0; i < kRuns * kRunBlocks; ++i) request.add_keys(KeyBytes(i));
  if (chain) request.mutable_elsewhere()->set_hint("n0");
  v1::LookupReply reply;
  std::promise<grpc::Status> done;
  stub_->async()->Lookup(&context, &request, &reply,
                         [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  if (!status.ok()) Fail(status.error_message());
}

}  // namespace kvmill::testing
