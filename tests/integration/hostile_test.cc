// Callers that keep no promise: they do not read, do not finish, do not hang up.
#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "kernels/tile_format.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// A Store call without a deadline, below the client library.
class RawStore {
 public:
  RawStore(const std::string& socket, const std::string& namespace_name) : pass_(socket) {
    pass_.AddTo(&context_);
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stub_ = v1::Cache::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials(), arguments));
    stream_ = stub_->Store(&context_);
    v1::StoreRequest begin;
    begin.mutable_begin()->mutable_namespace_()->set_name(namespace_name);
    EXPECT_TRUE(stream_->Write(begin));
  }
  ~RawStore() { context_.TryCancel(); }

  grpc::ClientReaderWriter<v1::StoreRequest, v1::StoreReply>& stream() { return *stream_; }
  void Cancel() { context_.TryCancel(); }
  grpc::Status Lookup(const v1::LookupRequest& request, v1::LookupReply* reply) {
    grpc::ClientContext context;
    pass_.AddTo(&context);
    return stub_->Lookup(&context, request, reply);
  }

 private:
  const LocalPass pass_;
  std::unique_ptr<v1::Cache::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StoreRequest, v1::StoreReply>> stream_;
};

class HostileTest : public DaemonTest {};

TEST_F(HostileTest, ACallerThatReadsNoReplyIsNotReadFromForEver) {
  Start();
  Open("n", SmallSpec());
  RawStore store(socket(), "n");
  // Every message fails a block of its own, which makes a reply.
  // They are small: what lies in the buffers of both transports does not matter much.
  constexpr std::uint32_t kMessages = 500000;
  std::atomic<std::uint32_t> sent{0};
  std::thread writer([&] {
    v1::StoreRequest request;
    v1::StoreChunk& chunk = *request.mutable_chunk();
    chunk.set_key("0123456789abcdef");
    chunk.set_token_count(64);
    chunk.set_layer_count(1);
    chunk.set_head_count(1);
    chunk.set_last(true);
    chunk.set_inline_(std::string(16, 'x'));  // Of another length than it should.
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      chunk.set_sequence(i);
      if (!store.stream().Write(request)) return;
      ++sent;
    }
    store.stream().WritesDone();
  });
  // Until nothing moves for a second.
  for (std::uint32_t last = ~0u; last != sent;) {
    last = sent;
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  EXPECT_LT(sent, kMessages) << "the daemon holds the replies to all of them";
  std::uint32_t failed = 0;
  v1::StoreReply reply;
  while (store.stream().Read(&reply)) {
    if (reply.has_result()) failed += reply.result().outcome() == v1::STORE_FAILED ? 1 : 0;
  }
  writer.join();
  EXPECT_EQ(failed, kMessages) << "reading goes on once the replies are read";
  EXPECT_TRUE(store.stream().Finish().ok());
}

// As clients spoke before tails had keys of their own: key empty in the chunk of a tail, and
// find_tail (field 3) in a lookup.
TEST_F(HostileTest, ATailWithoutAKeyIsRefusedAndNothingElse) {
  Start();
  const NamespaceSpec spec = SmallSpec();
  Open("n", spec);
  const std::size_t row_bytes = 2 * 2 * RawBytes(FormatOf(spec, spec.groups[0]), 1);
  RawStore store(socket(), "n");
  for (const std::uint32_t tokens : {64u, 20u}) {
    v1::StoreRequest request;
    v1::StoreChunk& chunk = *request.mutable_chunk();
    chunk.set_sequence(tokens);
    if (tokens == 64) chunk.set_key("the-first-block-");
    if (tokens < 64) chunk.set_parent("the-first-block-");
    chunk.set_token_count(tokens);
    chunk.set_block_index(tokens == 64 ? 0 : 1);
    chunk.set_layer_count(2);
    chunk.set_head_count(2);
    chunk.set_last(true);
    chunk.set_inline_(std::string(tokens * row_bytes, '\0'));
    ASSERT_TRUE(store.stream().Write(request));
  }
  store.stream().WritesDone();
  std::map<std::uint32_t, v1::StoreResult> results;
  v1::StoreReply reply;
  while (store.stream().Read(&reply)) {
    if (reply.has_result()) results[reply.result().sequence()] = reply.result();
  }
  EXPECT_TRUE(store.stream().Finish().ok());
  EXPECT_EQ(results[64].outcome(), v1::STORE_STORED) << results[64].ShortDebugString();
  EXPECT_EQ(results[20].outcome(), v1::STORE_FAILED);
  EXPECT_EQ(results[20].status().message(),
            "block 20: a tail of 20 tokens without a key: want 1 to 64 bytes that stand for its "
            "tokens and all before them");
  v1::LookupRequest request;
  request.mutable_namespace_()->set_name("n");
  request.add_keys("the-first-block-");
  ASSERT_TRUE(request.ParseFromString(request.SerializeAsString() + std::string("\x18\x01")));
  v1::LookupReply found;
  ASSERT_TRUE(store.Lookup(request, &found).ok());
  EXPECT_EQ(found.hit_blocks(), 1u);
  EXPECT_EQ(found.tail_tokens(), 0u);
  EXPECT_EQ(client_->Stat()->blocks, 1u);
}

TEST_F(HostileTest, UnfinishedBlocksFillTheMemoryAndNeitherOthersNorTheDrainHang) {
  Start({"--drain-timeout", "1s"});
  NamespaceSpec spec = SmallSpec();
  spec.groups[0].layers.resize(16);
  for (std::uint16_t layer = 0; layer < 16; ++layer) spec.groups[0].layers[layer] = layer;
  spec.groups[0].kv_heads = 8;
  spec.groups[0].head_dim = 128;
  Open("n", spec);
  const std::size_t bytes = RawBytes(FormatOf(spec, spec.groups[0]), spec.block_tokens);
  RawStore store(socket(), "n");
  std::thread writer([&] {
    for (std::uint32_t i = 0; i < 3000; ++i) {
      v1::StoreRequest request;
      v1::StoreChunk& chunk = *request.mutable_chunk();
      chunk.set_sequence(i);
      chunk.set_key(absl::StrCat("unfinished-block-", i));
      chunk.set_token_count(spec.block_tokens);
      chunk.set_layer_count(1);
      chunk.set_head_count(1);
      chunk.set_inline_(std::string(bytes, '\0'));
      if (!store.stream().Write(request)) return;
    }
  });
  const auto deadline = steady_clock::now() + std::chrono::seconds(30);
  for (bool full = false; !full && steady_clock::now() < deadline;) {
    const auto stat = client_->Stat();
    ASSERT_TRUE(stat.ok()) << stat.status();
    full = stat->tiers[0].used_bytes + (std::uint64_t{1} << 20) > stat->tiers[0].capacity_bytes;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }

  const ClientNamespace other = Open("other", SmallSpec());
  Sequence sequence(other.spec, 64 * 8, 1);
  const auto start = steady_clock::now();
  const auto result = client_->Store(other, sequence.Blocks("s"), {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_LT(SecondsSince(start), 20);
  for (const StoreBlockResult& block : result->blocks) {
    EXPECT_TRUE(block.status.ok() || absl::IsResourceExhausted(block.status)) << block.status;
  }

  const auto stop = steady_clock::now();
  daemon_->Signal(SIGTERM);
  const Exit exit = daemon_->WaitExit(std::chrono::seconds(20));
  EXPECT_TRUE(exit.in_time);
  EXPECT_EQ(exit.code, 0) << daemon_->standard_error();
  EXPECT_LT(SecondsSince(stop), 15);
  store.Cancel();
  writer.join();
}

TEST_F(HostileTest, SlowHttpCallersKeepNeitherProbesNorTheDrainWaiting) {
  Start({"--metrics", "127.0.0.1:0", "--drain-timeout", "1s"});
  const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
  const auto connect_to = [&] {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(address.port);
    inet_pton(AF_INET, address.host.c_str(), &to.sin_addr);
    EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  };
  const auto send_text = [](int fd, const std::string& text) {
    return ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
  };
  std::vector<int> slow;
  std::atomic<bool> stop{false};
  for (int i = 0; i < 100; ++i) {
    slow.push_back(connect_to());
    send_text(slow.back(), "GET /healthz HTTP/1.1\r\n");
  }
  std::thread trickle([&] {
    while (!stop) {
      for (const int fd : slow) send_text(fd, "A: b\r\n");
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  });
  double quickest = 1e9;  // A busy machine may keep one waiting, too.
  for (int i = 0; i < 3; ++i) {
    const auto start = steady_clock::now();
    const int fd = connect_to();
    send_text(fd, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
    std::string answer;
    char buffer[512];
    for (ssize_t n = 0; (n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
      answer.append(buffer, static_cast<std::size_t>(n));
    }
    close(fd);
    EXPECT_EQ(answer.substr(0, 15), "HTTP/1.1 200 OK");
    quickest = std::min(quickest, SecondsSince(start));
  }
  EXPECT_LT(quickest, 2);
  const auto start = steady_clock::now();
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->WaitExit(std::chrono::seconds(30)).code, 0);
  EXPECT_LT(SecondsSince(start), 15);
  stop = true;
  trickle.join();
  for (const int fd : slow) close(fd);
}

}  // namespace
}  // namespace kvmill::testing
