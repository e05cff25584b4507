// A long payload takes no more allocations than a short one: nothing is allocated per segment or
// per page. Counts what this program allocates by operator new, UCX's own memory not included.
#include "tests/client/transport/transport_fixture.h"
#include "tests/count_allocations.h"

namespace kvmill::testing {
namespace {

class AllocationTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, AllocationTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Plaintext" : "Encrypted");
});

TEST_P(AllocationTest, LongPayloadsCostNoMoreThanShortOnes) {
  constexpr std::size_t kPageBytes = 111 << 10;
  Pair pair(TransportKind{true, GetParam()});
  pair.server_options.limits.request_bytes_max = 64 << 20;
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> pool = RandomData(256 * kPageBytes, 1);
  std::vector<std::byte> place(pool.size());
  // Pages between pools: an answer gathered from `pages` spans into as many.
  std::size_t pages = 0;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    SourceSpans spans;
    spans.reserve(pages);
    for (std::size_t i = 0; i < pages; ++i) {
      spans.push_back(absl::MakeConstSpan(pool).subspan(i * kPageBytes, kPageBytes));
    }
    call->Respond({.payload = std::move(spans)});
  });
  const auto pull = [&](std::size_t count) {
    pages = count;
    auto result = std::make_shared<CallResult>();
    Call call;
    call.timeout_nanos = 40 * kSecond;
    call.place = [&](const ResponseHead&, DestinationSpans* spans) {
      spans->reserve(pages);
      for (std::size_t i = 0; i < pages; ++i) {
        spans->push_back(absl::MakeSpan(place).subspan(i * kPageBytes, kPageBytes));
      }
      return absl::OkStatus();
    };
    call.done = [result](absl::StatusOr<Response> r) { result->done.Set(std::move(r)); };
    const std::uint64_t before = allocations.load();
    connection->Start(std::move(call));
    EXPECT_TRUE(pair.Wait(result).ok()) << result->status();
    pair.ExpectIdle();
    return allocations.load() - before;
  };
  // What is reused is made when it is first needed, and that is up to the loops' turns: while the
  // receiver is slow the sender fills its window of segments, otherwise one may do. This happens a
  // few times at most, an allocation for each page or segment every time: the least of several, and
  // of more on a machine whose loops get their turns badly. What every pull allocates stays.
  const auto least = [&](std::size_t count, std::uint64_t enough) {
    std::uint64_t allocated = pull(count);
    for (int i = 1; i < 8 || (i < 60 && allocated > enough); ++i) {
      allocated = std::min(allocated, pull(count));
    }
    return allocated;
  };
  const std::uint64_t of_short = least(4, 40);
  const std::uint64_t of_long = least(256, of_short + 10);
  EXPECT_TRUE(place == pool);
  EXPECT_LE(of_long, of_short + 10) << "252 pages more";
  EXPECT_LE(of_short, 40u);
}

}  // namespace
}  // namespace kvmill::testing
