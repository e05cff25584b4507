#include "client/cli/tile_codec.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/device_codec.h"
#include "client/cli/output.h"
#include "client/cli/relative_error.h"
#include "kernels/decode.h"
#include "kernels/engine_pages.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

// Kernel scratch, aligned to 64.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(operator new (bytes, std::align_val_t{64}))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { operator delete (data_, std::align_val_t{64}); }
  absl::Span<std::byte> span() { return {data_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

// Calls work(block) for every block from as many threads as there are processors, and shows
// progress. `make_worker` is called once a thread.
void ForEachBlock(std::uint32_t block_count, absl::string_view what,
                  const std::function<std::function<void(std::uint32_t)>()>& make_worker) {
  const std::uint32_t thread_count =
      std::max(1u, std::min(std::thread::hardware_concurrency(), block_count));
  std::atomic<std::uint32_t> next{0};
  const auto run = [&](Progress* progress) {
    const std::function<void(std::uint32_t)> work = make_worker();
    for (std::uint32_t block; (block = next.fetch_add(1)) < block_count;) {
      work(block);
      if (progress != nullptr) progress->Update(block, block_count, "blocks");
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t t = 1; t < thread_count; ++t) threads.emplace_back(run, nullptr);
  Progress progress(what);
  run(&progress);
  for (std::thread& thread : threads) thread.join();
}

// One head of one block of a tensor, as a kernel wants it. Not movable: `view` points into it.
template <typename Byte>
struct HeadOfBlock {
  HeadOfBlock(Byte* values, std::uint32_t heads, std::uint32_t head_dim, DType dtype,
              std::uint32_t first_token, std::uint32_t token_count, std::uint32_t head) {
    const std::size_t row_bytes = std::size_t{2} * heads * head_dim;
    page = values + first_token * row_bytes;
    view.pages = &page;
    view.offset_bytes = std::size_t{2} * head * head_dim;
    view.page_tokens = token_count;
    view.token_stride_bytes = static_cast<std::ptrdiff_t>(row_bytes);
    view.dtype = dtype;
  }
  HeadOfBlock(const HeadOfBlock&) = delete;
  HeadOfBlock& operator=(const HeadOfBlock&) = delete;
  Byte* page;
  BasicHeadPages<Byte> view;
};

HeadOfBlock<const std::byte> ReadHead(const Tensor& t, const TileFormat& format,
                                      std::uint32_t block, std::uint32_t head) {
  return {reinterpret_cast<const std::byte*>(t.values.data()),
          t.heads,
          t.head_dim,
          t.dtype,
          block * format.group,
          format.group,
          head};
}
HeadOfBlock<std::byte> WriteHead(Tensor& t, const TileFormat& format, std::uint32_t block,
                                 std::uint32_t head) {
  return {reinterpret_cast<std::byte*>(t.values.data()),
          t.heads,
          t.head_dim,
          t.dtype,
          block * format.group,
          format.group,
          head};
}

std::uint16_t ValueAt(const HeadPages& pages, std::uint32_t token, std::uint32_t channel) {
  std::uint16_t value;
  std::memcpy(&value, pages.Row(token) + std::size_t{2} * channel, sizeof(value));
  return value;
}

void AddErrors(const HeadPages& pages, const TileFormat& format, const float* decoded,
               SquareSums* sums) {
  for (std::uint32_t token = 0; token < format.group; ++token) {
    for (std::uint32_t channel = 0; channel < format.head_dim; ++channel) {
      sums->Add(decoded[std::size_t{token} * format.head_dim + channel],
                ToFloat(ValueAt(pages, token, channel), pages.dtype));
    }
  }
}

// What one thread makes of one block; merged in block order, so results do not depend on threads.
struct BlockOutcome {
  absl::Status status;
  std::vector<RawHead> raw_heads;
  SquareSums k, v;
};

RawHead CopyRawHead(const HeadPages& k, const HeadPages& v, const TileFormat& format,
                    std::uint32_t block, std::uint32_t head) {
  RawHead raw;
  raw.block = block;
  raw.head = head;
  for (std::uint32_t token = 0; token < format.group; ++token) {
    for (std::uint32_t channel = 0; channel < format.head_dim; ++channel) {
      raw.k.push_back(ValueAt(k, token, channel));
      raw.v.push_back(ValueAt(v, token, channel));
    }
  }
  return raw;
}

absl::Status DescribeNonFinite(const HeadPages& k, const HeadPages& v, const TileFormat& format,
                               std::uint32_t block, std::uint32_t head) {
  const NonFinite at = FindNonFinite(k, v, format.group, format.head_dim);
  const std::uint16_t bits = ValueAt(at.in_value ? v : k, at.token, at.channel);
  return absl::InvalidArgumentError(
      absl::StrCat(at.in_value ? "V" : "K", ": token ", block * format.group + at.token, " head ",
                   head, " channel ", at.channel, " is ", ToFloat(bits, k.dtype),
                   "; a tile holds finite values only"));
}

// Encodes and measures the heads of one block. Owned by one thread.
class BlockEncoder {
 public:
  // `done`: what a device made of each head of each block; then only the measuring is left.
  BlockEncoder(const Tensor& k, const Tensor& v, const TileFormat& format, Encoder encoder,
               Algorithm algorithm, absl::Span<const EncodeResult> done)
      : k_(k),
        v_(v),
        format_(format),
        encoder_(encoder),
        algorithm_(algorithm),
        done_(done),
        scratch_(EncodeScratchBytes(format)),
        decoded_k_(std::size_t{format.group} * format.head_dim),
        decoded_v_(decoded_k_.size()) {}

  // `records`: of this block, one record a head.
  void Encode(std::uint32_t block, char* records, BlockOutcome& outcome) {
    for (std::uint32_t head = 0; head < k_.heads; ++head) {
      const auto k = ReadHead(k_, format_, block, head);
      const auto v = ReadHead(v_, format_, block, head);
      auto* record = reinterpret_cast<std::byte*>(records + head * RecordBytes(format_));
      const EncodeArgs args{k.view, v.view, record};
      const EncodeResult result = encoder_ == Encoder::kDevice
                                      ? done_[std::size_t{block} * k_.heads + head]
                                      : EncodeHead(args);
      if (result == EncodeResult::kNonFinite) {
        outcome.status = DescribeNonFinite(k.view, v.view, format_, block, head);
        return;
      }
      if (result == EncodeResult::kRaw) {
        std::memset(record, 0, RecordBytes(format_));
        outcome.raw_heads.push_back(CopyRawHead(k.view, v.view, format_, block, head));
        continue;
      }
      const auto decode =
          encoder_ == Encoder::kReference ? &DecodeTileToFloatReference : &DecodeTileToFloatCpu;
      decode(format_, Frame::kModel, record, absl::MakeSpan(decoded_k_),
             absl::MakeSpan(decoded_v_));
      AddErrors(k.view, format_, decoded_k_.data(), &outcome.k);
      AddErrors(v.view, format_, decoded_v_.data(), &outcome.v);
    }
  }

 private:
  EncodeResult EncodeHead(const EncodeArgs& args) {
    EncodeResult result = EncodeResult::kTile;
    const bool fast = encoder_ == Encoder::kCpu;
    const auto encode = fast ? CpuEncoderOf(algorithm_) : ReferenceEncoderOf(algorithm_);
    encode(format_, Frame::kModel, absl::MakeConstSpan(&args, 1), absl::MakeSpan(&result, 1),
           scratch_.span());
    return result;
  }

  const Tensor& k_;
  const Tensor& v_;
  const TileFormat format_;
  const Encoder encoder_;
  const Algorithm algorithm_;
  const absl::Span<const EncodeResult> done_;
  Scratch scratch_;
  std::vector<float> decoded_k_, decoded_v_;
};

absl::Status CheckScales(const TileFormat& format, const char* record, std::uint32_t block,
                         std::uint32_t head) {
  const RecordLayout layout = LayoutOf(format);
  const auto check = [&](std::size_t begin, std::size_t end, absl::string_view name) {
    for (std::size_t at = begin; at < end; at += 2) {
      std::uint16_t bits;
      std::memcpy(&bits, record + at, sizeof(bits));
      if (std::isfinite(Float16ToFloat(bits))) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block, " head ", head, ": ", name, " scale ", (at - begin) / 2,
                       " is ", Float16ToFloat(bits), "; the file is damaged or not records of ",
                       ToString(format), " with head_dim ", format.head_dim));
    }
    return absl::OkStatus();
  };
  absl::Status status = check(layout.k_scale, layout.v_codes, "K");
  if (status.ok()) status = check(layout.v_channel, layout.bytes, "V");
  return status;
}

}  // namespace

absl::StatusOr<EncodedTensors> EncodeTensors(const Tensor& k, const Tensor& v,
                                             const TileFormat& format, Encoder encoder,
                                             Device* device, Algorithm algorithm) {
  if (k.tokens != v.tokens || k.heads != v.heads || k.head_dim != v.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("K is ", k.ShapeString(), " and V is ",
                                                   v.ShapeString(), "; they must be the same"));
  }
  if (k.head_dim != format.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim of the tensors is ", k.head_dim,
                                                   ", of the format ", format.head_dim));
  }
  if (encoder == Encoder::kDevice && algorithm == Algorithm::kRefined) {
    return absl::UnimplementedError(
        "--algorithm refined has no GPU kernel: the host does it; use --encoder cpu");
  }
  EncodedTensors encoded;
  encoded.block_count = k.tokens / format.group;
  encoded.tail_tokens = k.tokens % format.group;
  const std::size_t block_bytes = RecordBytes(format) * k.heads;
  encoded.records.resize(encoded.block_count * block_bytes);
  std::vector<EncodeResult> done;
  if (encoder == Encoder::kDevice) {
    KVMILL_RETURN_IF_ERROR(EncodeOnDevice(*device, k, v, format, &encoded.records, &done));
  }
  std::vector<BlockOutcome> outcomes(encoded.block_count);
  ForEachBlock(encoded.block_count, "encoding", [&] {
    // Shared because std::function must be copyable; one thread uses it.
    auto worker = std::make_shared<BlockEncoder>(k, v, format, encoder, algorithm, done);
    return [&, worker](std::uint32_t block) {
      worker->Encode(block, encoded.records.data() + block * block_bytes, outcomes[block]);
    };
  });
  SquareSums k_sums, v_sums;
  for (BlockOutcome& outcome : outcomes) {
    if (!outcome.status.ok()) return outcome.status;
    for (RawHead& raw : outcome.raw_heads) encoded.raw_heads.push_back(std::move(raw));
    k_sums.Add(outcome.k);
    v_sums.Add(outcome.v);
  }
  encoded.rel_error_k = k_sums.RelativeError();
  encoded.rel_error_v = v_sums.RelativeError();
  return encoded;
}

absl::StatusOr<DecodedTensors> DecodeRecords(absl::string_view records, const TileFormat& format,
                                             std::uint32_t heads, DType dtype, Frame frame,
                                             const std::vector<RawHead>& raw_heads) {
  const std::size_t record_bytes = RecordBytes(format);
  const std::size_t block_bytes = record_bytes * heads;
  if (records.size() % block_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(records.size(), " bytes are not a whole number of blocks of ", block_bytes,
                     " (", heads, " heads x ", record_bytes, " bytes of ", ToString(format),
                     " with head_dim ", format.head_dim, ")"));
  }
  if (records.size() / block_bytes > UINT32_MAX / format.group) {
    return absl::InvalidArgumentError(
        absl::StrCat(records.size() / block_bytes, " blocks, at most ", UINT32_MAX / format.group));
  }
  DecodedTensors decoded;
  decoded.block_count = static_cast<std::uint32_t>(records.size() / block_bytes);
  for (Tensor* tensor : {&decoded.k, &decoded.v}) {
    tensor->tokens = decoded.block_count * format.group;
    tensor->heads = heads;
    tensor->head_dim = format.head_dim;
    tensor->dtype = dtype;
    tensor->values.resize(std::size_t{tensor->tokens} * heads * format.head_dim);
  }
  std::vector<absl::Status> statuses(decoded.block_count);
  ForEachBlock(decoded.block_count, "decoding", [&] {
    auto scratch = std::make_shared<Scratch>(DecodeScratchBytes(format));
    return [&, scratch](std::uint32_t block) {
      for (std::uint32_t head = 0; head < heads; ++head) {
        const char* record = records.data() + block * block_bytes + head * record_bytes;
        statuses[block] = CheckScales(format, record, block, head);
        if (!statuses[block].ok()) return;
        const auto k = WriteHead(decoded.k, format, block, head);
        const auto v = WriteHead(decoded.v, format, block, head);
        const DecodeArgs args{reinterpret_cast<const std::byte*>(record), k.view, v.view};
        DecodeTilesCpu(format, frame, absl::MakeConstSpan(&args, 1), scratch->span());
      }
    };
  });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  for (const RawHead& raw : raw_heads) {
    const auto k = WriteHead(decoded.k, format, raw.block, raw.head);
    const auto v = WriteHead(decoded.v, format, raw.block, raw.head);
    const std::size_t row_bytes = std::size_t{2} * format.head_dim;
    for (std::uint32_t token = 0; token < format.group; ++token) {
      const std::size_t at = std::size_t{token} * format.head_dim;
      std::memcpy(k.view.Row(token), raw.k.data() + at, row_bytes);
      std::memcpy(v.view.Row(token), raw.v.data() + at, row_bytes);
    }
  }
  return decoded;
}

}  // namespace kvmill::cli
