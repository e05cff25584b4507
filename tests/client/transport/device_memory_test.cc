// Payloads in memory that the CPU cannot touch, over the fake transport: what the code above a wire
// does with MemoryKind::kCuda. No GPU has run it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/transport/transport_fixture.h"
#include "tests/storage/hidden_device.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class DeviceMemoryTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kRegionBytes = 4 << 20;
  enum Region : std::uint8_t { kSource, kServer, kDestination, kRegions };

  void Make(bool plaintext) {
    pair_ = std::make_unique<Pair>(TransportKind{.ucx = false, .plaintext = plaintext});
    pair_->network()->set_nature(
        {.copy_device = [this](std::byte* to, const std::byte* from, std::size_t bytes) {
          std::byte* const real_to = gpu_.Real(to);
          const std::byte* const real_from = gpu_.Real(from);
          EXPECT_NE(real_to == nullptr, real_from == nullptr) << "one end is the host's";
          std::memcpy(real_to != nullptr ? real_to : to, real_from != nullptr ? real_from : from,
                      bytes);
        }});
    pair_->Make();
    memory_ = *gpu_.Allocate(kRegions * kRegionBytes, "test");
  }
  absl::Span<std::byte> At(Region region, std::size_t bytes) {
    return {memory_->address() + region * kRegionBytes, bytes};
  }
  bool Holds(Region region, const std::vector<std::byte>& data) {
    const std::byte* const real = gpu_.Real(At(region, data.size()).data());
    return std::equal(data.begin(), data.end(), real);
  }
  // In three parts of different length.
  template <typename Spans, typename Span>
  static Spans Parts(Span all) {
    const std::size_t first = all.size() / 5;
    return {all.first(first), all.subspan(first, first), all.subspan(2 * first)};
  }

  HiddenDevice gpu_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<Pair> pair_;
};

TEST_F(DeviceMemoryTest, PayloadsGoBothWaysWithoutTheHost) {
  Make(/*plaintext=*/true);
  EXPECT_TRUE(pair_->client->Supports(MemoryKind::kCuda));
  const ConnectionPtr connection = pair_->Connect();
  // What is received on the device is sent back from there.
  pair_->server_handler.set_on_call([this](std::unique_ptr<IncomingCall> call) {
    const std::size_t bytes = call->payload_bytes();
    IncomingCall* const raw = call.get();
    auto shared = std::make_shared<std::unique_ptr<IncomingCall>>(std::move(call));
    raw->Receive(Parts<DestinationSpans>(At(kServer, bytes)), MemoryKind::kCuda,
                 [this, shared, bytes](absl::Status status) {
                   const absl::Span<const std::byte> from = At(kServer, bytes);
                   (*shared)->Respond({.status = status,
                                       .payload = Parts<SourceSpans>(from),
                                       .payload_memory = MemoryKind::kCuda});
                   shared->reset();
                 });
  });
  std::uint64_t copied = 0;
  for (const std::size_t bytes :
       {std::size_t{5}, std::size_t{4096}, std::size_t{700'001}, kRegionBytes}) {
    const std::vector<std::byte> data = RandomData(bytes, bytes);
    std::memcpy(gpu_.Real(At(kSource, bytes).data()), data.data(), bytes);
    Box<absl::StatusOr<Response>> done;
    Call call;
    const absl::Span<const std::byte> source = At(kSource, bytes);
    call.payload = {source};
    call.payload_memory = MemoryKind::kCuda;
    call.place_memory = MemoryKind::kCuda;
    call.timeout_nanos = 40 * kSecond;
    call.place = [this](const ResponseHead& head, DestinationSpans* spans) {
      spans->push_back(At(kDestination, head.payload_bytes));
      return absl::OkStatus();
    };
    call.done = [&done](absl::StatusOr<Response> response) { done.Set(std::move(response)); };
    connection->Start(std::move(call));
    ASSERT_TRUE(pair_->WaitFor([&] { return done.has(); }));
    ASSERT_TRUE(done.Get().ok()) << done.Get().status();
    EXPECT_TRUE(Holds(kServer, data)) << bytes;
    EXPECT_TRUE(Holds(kDestination, data)) << bytes;
    copied += 4 * bytes;  // At each end of each way.
    EXPECT_EQ(pair_->network()->device_bytes(), copied);
  }
  pair_->ExpectIdle();
}

TEST_F(DeviceMemoryTest, EitherEndMayBeInHostMemory) {
  Make(/*plaintext=*/true);
  const ConnectionPtr connection = pair_->Connect();
  constexpr std::size_t kBytes = 1'000'003;
  const std::vector<std::byte> data = RandomData(kBytes, 7);
  std::memcpy(gpu_.Real(At(kSource, kBytes).data()), data.data(), kBytes);
  pair_->server_handler.set_on_call([this](const std::unique_ptr<IncomingCall>& call) {
    const absl::Span<const std::byte> from = At(kSource, kBytes);
    call->Respond({.payload = {from}, .payload_memory = MemoryKind::kCuda});
  });
  const CallResultPtr result = pair_->Start(connection, "give");
  EXPECT_TRUE(pair_->Wait(result).ok()) << result->status();
  EXPECT_TRUE(result->destination == data);
  EXPECT_EQ(pair_->network()->device_bytes(), kBytes);
}

TEST_F(DeviceMemoryTest, WhereBytesAreEncryptedItIsRefused) {
  Make(/*plaintext=*/false);
  EXPECT_FALSE(pair_->client->Supports(MemoryKind::kCuda));
  const ConnectionPtr connection = pair_->Connect();
  Box<absl::StatusOr<Response>> done;
  Call call;
  const absl::Span<const std::byte> source = At(kSource, 4096);
  call.payload = {source};
  call.payload_memory = MemoryKind::kCuda;
  call.timeout_nanos = kSecond;
  call.done = [&done](absl::StatusOr<Response> response) { done.Set(std::move(response)); };
  connection->Start(std::move(call));
  ASSERT_TRUE(pair_->WaitFor([&] { return done.has(); }));
  EXPECT_EQ(done.Get().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(done.Get().status().message()), HasSubstr("plaintext"));
  EXPECT_EQ(pair_->network()->device_bytes(), 0u);
}

}  // namespace
}  // namespace kvmill::testing
