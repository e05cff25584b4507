// Encode, decode, attention and the generation check through a device: the same results as the
// reference has on the host, from arguments that lie on the device.
#include <cmath>
#include <cstdint>
#include <random>

#include "kernels/attention_range.h"
#include "kernels/float16.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

using DeviceKernelsTest = DeviceTest;

constexpr std::uint32_t kPageTokens = 16;

std::vector<std::uint16_t> Gaussian(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> gauss;
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& v : values) v = FloatToFloat16(gauss(random));
  return values;
}

std::vector<std::byte> Scratch(std::size_t bytes) { return std::vector<std::byte>(bytes + 64); }
absl::Span<std::byte> Aligned(std::vector<std::byte>& scratch) {
  const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
  return {scratch.data() + (64 - address % 64) % 64, scratch.size() - 64};
}

// Tiles of one format: K and V in engine pages, on the host and, at other addresses, on a device.
class Tiles {
 public:
  Tiles(const TileFormat& format, std::size_t count, std::uint32_t seed)
      : format_(format), count_(count), pages_of_half_(format.group / kPageTokens) {
    std::mt19937 random(seed);
    values_ = Gaussian(count * RawBytes(format, format.group) / 2, random);
  }

  // Lists for `values` at `base`; `pages(list)` is where a list of pages goes.
  template <typename Pages, typename PutList>
  std::vector<Pages> Halves(std::byte* base, const PutList& put_list) const {
    std::vector<Pages> halves;
    const std::size_t page_bytes = std::size_t{2} * kPageTokens * format_.head_dim;
    for (std::size_t half = 0; half < 2 * count_; ++half) {
      std::vector<std::byte*> list;
      for (std::size_t page = 0; page < pages_of_half_; ++page) {
        list.push_back(base + (half * pages_of_half_ + page) * page_bytes);
      }
      Pages pages;
      pages.pages = put_list(list);
      pages.page_tokens = kPageTokens;
      pages.token_stride_bytes = std::ptrdiff_t{2} * format_.head_dim;
      halves.push_back(pages);
    }
    return halves;
  }

  // The reference's records, and whether each is a tile.
  std::vector<std::byte> EncodeReference(Frame frame) {
    std::vector<std::vector<const std::byte*>> lists;
    lists.reserve(2 * count_);
    const auto halves = Halves<HeadPages>(
        reinterpret_cast<std::byte*>(values_.data()), [&](const std::vector<std::byte*>& list) {
          return lists.emplace_back(list.begin(), list.end()).data();
        });
    std::vector<std::byte> records(count_ * RecordBytes(format_));
    std::vector<EncodeArgs> args;
    for (std::size_t i = 0; i < count_; ++i) {
      args.push_back({halves[2 * i], halves[2 * i + 1], records.data() + i * RecordBytes(format_)});
    }
    std::vector<EncodeResult> results(count_);
    std::vector<std::byte> scratch = Scratch(EncodeScratchBytes(format_));
    EncodeTilesReference(format_, frame, args, absl::MakeSpan(results), Aligned(scratch));
    EXPECT_EQ(results, std::vector<EncodeResult>(count_, EncodeResult::kTile));
    return records;
  }

  const TileFormat& format() const { return format_; }
  std::size_t count() const { return count_; }
  std::vector<std::uint16_t>& values() { return values_; }
  std::size_t value_bytes() const { return values_.size() * 2; }

 private:
  const TileFormat format_;
  const std::size_t count_;
  const std::size_t pages_of_half_;
  std::vector<std::uint16_t> values_;
};

// Both records decoded by the reference.
double DecodedDistance(const TileFormat& format, const std::byte* a, const std::byte* b) {
  const std::size_t values = std::size_t{format.group} * format.head_dim;
  std::vector<float> ak(values), av(values), bk(values), bv(values);
  DecodeTileToFloatReference(format, Frame::kRotated, a, absl::MakeSpan(ak), absl::MakeSpan(av));
  DecodeTileToFloatReference(format, Frame::kRotated, b, absl::MakeSpan(bk), absl::MakeSpan(bv));
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < values; ++i) {
    for (const auto& [x, y] : {std::pair(ak[i], bk[i]), std::pair(av[i], bv[i])}) {
      difference += std::pow(static_cast<double>(x - y), 2);
      norm += std::pow(static_cast<double>(y), 2);
    }
  }
  return std::sqrt(difference / norm);
}

TEST_F(DeviceKernelsTest, EncodesAndDecodesAsTheReference) {
  const auto stream = Stream();
  std::uint32_t seed = 0;
  for (const auto& [name, dim] :
       {std::pair("k4v2_g128", 128), std::pair("k2v4_g64", 64), std::pair("k4v4_g64", 256)}) {
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      SCOPED_TRACE(name);
      Tiles tiles(*ParseTileFormat(name, static_cast<std::uint32_t>(dim)), 3, ++seed);
      const TileFormat& format = tiles.format();
      const std::size_t record_bytes = RecordBytes(format);
      const std::vector<std::byte> want = tiles.EncodeReference(frame);

      DeviceImage image(*device_, std::size_t{8} << 20);
      std::byte* const values = image.PutBytes(tiles.values().data(), tiles.value_bytes());
      std::byte* const decoded = image.Reserve(tiles.value_bytes());
      std::byte* const records = image.Reserve(tiles.count() * record_bytes + 1) + 1;
      const auto put = [&](const std::vector<std::byte*>& list) { return image.Put(list); };
      const auto from = tiles.Halves<HeadPages>(values, [&](const std::vector<std::byte*>& list) {
        return const_cast<const std::byte**>(image.Put(list));
      });
      const auto to = tiles.Halves<MutableHeadPages>(decoded, put);
      std::vector<EncodeArgs> encode;
      std::vector<DecodeArgs> decode;
      for (std::size_t i = 0; i < tiles.count(); ++i) {
        encode.push_back({from[2 * i], from[2 * i + 1], records + i * record_bytes});
        decode.push_back({records + i * record_bytes, to[2 * i], to[2 * i + 1]});
      }
      const auto* encode_args = image.Put(encode);
      const auto* decode_args = image.Put(decode);
      auto* results = reinterpret_cast<EncodeResult*>(image.Reserve(tiles.count()));

      // All of it enqueued behind the upload, and waited for once.
      ASSERT_EQ(image.Upload(*stream), absl::OkStatus());
      ASSERT_EQ(stream->Encode(format, frame, encode_args, tiles.count(), results),
                absl::OkStatus());
      ASSERT_EQ(stream->Decode(format, Frame::kRotated, decode_args, tiles.count()),
                absl::OkStatus());
      const auto got = Download<std::byte>(*stream, records, tiles.count() * record_bytes);
      EXPECT_EQ(Download<EncodeResult>(*stream, results, tiles.count()),
                std::vector<EncodeResult>(tiles.count(), EncodeResult::kTile));
      for (std::size_t i = 0; i < tiles.count(); ++i) {
        EXPECT_LT(DecodedDistance(format, &got[i * record_bytes], &want[i * record_bytes]), 2e-2);
      }

      // The rotated frame decodes to the bit.
      std::vector<std::byte> host(tiles.value_bytes());
      std::vector<std::vector<std::byte*>> lists;
      lists.reserve(2 * tiles.count());
      const auto host_to = tiles.Halves<MutableHeadPages>(
          host.data(),
          [&](const std::vector<std::byte*>& list) { return lists.emplace_back(list).data(); });
      std::vector<DecodeArgs> host_decode;
      for (std::size_t i = 0; i < tiles.count(); ++i) {
        host_decode.push_back({&got[i * record_bytes], host_to[2 * i], host_to[2 * i + 1]});
      }
      std::vector<std::byte> scratch = Scratch(DecodeScratchBytes(format));
      DecodeTilesReference(format, Frame::kRotated, host_decode, Aligned(scratch));
      EXPECT_EQ(Download<std::byte>(*stream, decoded, host.size()), host);
    }
  }
}

// Two sequences of tiles and raw blocks with tails, in one call; twice, so that the workspace is
// used again.
TEST_F(DeviceKernelsTest, AttendsAsTheReference) {
  const auto stream = Stream();
  const TileFormat format = *ParseTileFormat("k4v2_g64", 64);
  constexpr std::uint32_t kHeads = 2, kSharing = 3;
  constexpr std::uint32_t kBlocks[] = {3, 1};
  constexpr std::uint32_t kTail[] = {37, 0};
  const std::size_t raw_bytes = RawBytes(format, format.group);
  Tiles tiles(format, 4 * kHeads, 77);
  const std::vector<std::byte> records = tiles.EncodeReference(Frame::kModel);
  std::mt19937 random(5);
  const std::vector<std::uint16_t> raw = Gaussian(4 * kHeads * raw_bytes / 2, random);
  const std::vector<std::uint16_t> tail =
      Gaussian(std::size_t{2} * kHeads * 48 * format.head_dim, random);
  std::normal_distribution<float> gauss;
  std::vector<float> query(std::size_t{2} * kHeads * kSharing * format.head_dim);
  for (float& q : query) q = gauss(random);

  AttentionArgs args;
  args.shape.format = format;
  args.shape.kv_heads = kHeads;
  args.shape.q_heads = kHeads * kSharing;
  args.shape.scale = 0.125f;
  args.shape.raw = PackedRawLayout(format, DType::kFloat16, format.group);

  // The same call twice: `base_*` say where the bytes are, `put` where lists go.
  const auto sequences_at = [&](const std::byte* record, const std::byte* raw_at,
                                const std::byte* tail_at, const auto& put_blocks,
                                const auto& put_tails, const auto& put_pages) {
    std::vector<AttentionSequence> sequences;
    std::size_t entry = 0;
    for (int i = 0; i < 2; ++i) {
      AttentionSequence s;
      std::vector<AttentionBlock> blocks;
      for (std::uint32_t b = 0; b < kBlocks[i] * kHeads; ++b, ++entry) {
        const bool is_raw = entry % 3 == 1;
        blocks.push_back(
            {is_raw ? BlockKind::kRaw : BlockKind::kTile,
             is_raw ? raw_at + entry * raw_bytes : record + entry * RecordBytes(format)});
      }
      s.blocks = put_blocks(blocks);
      s.block_count = kBlocks[i];
      s.token_end = std::uint64_t{kBlocks[i]} * format.group + kTail[i];
      s.query_position = s.token_end - 1;
      std::vector<TailHead> tails(kTail[i] == 0 ? 0 : kHeads);
      for (std::size_t h = 0; h < tails.size(); ++h) {
        for (HeadPages* half : {&tails[h].k, &tails[h].v}) {
          std::vector<const std::byte*> pages;
          const std::size_t page_bytes = std::size_t{2} * kPageTokens * format.head_dim;
          for (std::size_t p = 0; p < 3; ++p) {
            pages.push_back(tail_at +
                            (3 * (2 * h + (half == &tails[h].v ? 1 : 0)) + p) * page_bytes);
          }
          half->pages = put_pages(pages);
          half->page_tokens = kPageTokens;
          half->token_stride_bytes = std::ptrdiff_t{2} * format.head_dim;
        }
      }
      s.tail = tails.empty() ? nullptr : put_tails(tails);
      sequences.push_back(s);
    }
    return sequences;
  };

  // Reference, on the host.
  std::vector<std::vector<AttentionBlock>> block_lists(2);
  std::vector<std::vector<TailHead>> tail_lists(2);
  std::vector<std::vector<const std::byte*>> page_lists(2 * kHeads);
  std::size_t blocks_used = 0, tails_used = 0, pages_used = 0;
  const auto keep = [](auto& lists, std::size_t& used) {
    return [&lists, &used](const auto& list) { return (lists[used++] = list).data(); };
  };
  const auto host_sequences =
      sequences_at(records.data(), reinterpret_cast<const std::byte*>(raw.data()),
                   reinterpret_cast<const std::byte*>(tail.data()), keep(block_lists, blocks_used),
                   keep(tail_lists, tails_used), keep(page_lists, pages_used));
  std::vector<float> want(query.size()), want_lse(query.size() / format.head_dim);
  AttentionArgs host_args = args;
  host_args.sequences = host_sequences;
  host_args.query = query.data();
  host_args.output = want.data();
  host_args.log_sum_exp = want_lse.data();
  ASSERT_EQ(ValidateAttention(host_args), absl::OkStatus());
  AttentionReference(host_args);

  // On the device.
  DeviceImage image(*device_, std::size_t{8} << 20);
  const std::byte* const record_at = image.PutBytes(records.data(), records.size());
  const auto* raw_at = reinterpret_cast<const std::byte*>(image.Put(raw));
  const auto* tail_at = reinterpret_cast<const std::byte*>(image.Put(tail));
  const auto put = [&](const auto& list) { return image.Put(list); };
  const auto sequences = sequences_at(record_at, raw_at, tail_at, put, put, put);
  args.sequences = {image.Put(sequences), sequences.size()};
  args.query = image.Put(query);
  args.output = image.Reserve(want.size() * sizeof(float));
  args.log_sum_exp = reinterpret_cast<float*>(image.Reserve(want_lse.size() * sizeof(float)));
  const std::uint32_t workers = device_->info().attention_workers;
  const std::size_t workspace_bytes = device_->AttendWorkspaceBytes(args.shape, 2, 2, workers);
  const auto workspace = Memory(workspace_bytes);
  ASSERT_EQ(image.Upload(*stream), absl::OkStatus());
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(stream->Attend(args, workers, workspace->address()), absl::OkStatus());
    const auto output = Download<float>(*stream, args.output, want.size());
    const auto lse = Download<float>(*stream, args.log_sum_exp, want_lse.size());
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(static_cast<double>(output[i] - want[i]), 2);
      norm += std::pow(static_cast<double>(want[i]), 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 1e-3);
    for (std::size_t i = 0; i < want_lse.size(); ++i) EXPECT_NEAR(lse[i], want_lse[i], 1e-3);
  }
}

// A reader's protocol: the words as they were when the work was enqueued, checked behind it. What
// is written in between is found.
TEST_F(DeviceKernelsTest, TheCheckAfterAReadFindsAChangedSlot) {
  const auto stream = Stream();
  // Words of a pool in host memory, mapped and pinned, as a reader has them.
  std::vector<std::uint64_t> words{2, 4, 6, 8};
  const absl::Span<std::byte> pinned(reinterpret_cast<std::byte*>(words.data()), 4 * 8);
  ASSERT_EQ(device_->Pin(pinned), absl::OkStatus());
  std::vector<GenerationCheck> checks;
  for (const std::uint64_t& word : words) checks.push_back({&word, word});
  DeviceImage image(*device_, 1 << 16);
  const auto* device_checks = image.Put(checks);
  auto* changed = image.Put(std::vector<std::uint32_t>{0, 0});
  ASSERT_EQ(image.Upload(*stream), absl::OkStatus());
  ASSERT_EQ(stream->CheckGenerations(device_checks, checks.size(), changed), absl::OkStatus());
  EXPECT_EQ(Download<std::uint32_t>(*stream, changed, 1), std::vector<std::uint32_t>{0});

  // While the readers are still at it, one slot is reused and another is being written.
  Gate gate;
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  ASSERT_EQ(stream->CheckGenerations(device_checks, checks.size(), changed + 1), absl::OkStatus());
  __atomic_store_n(&words[1], 6, __ATOMIC_RELEASE);
  __atomic_store_n(&words[3], 9, __ATOMIC_RELEASE);
  gate.Open();
  EXPECT_EQ(Download<std::uint32_t>(*stream, changed + 1, 1), std::vector<std::uint32_t>{2});
  device_->Unpin(pinned);
}

}  // namespace
}  // namespace kvmill
