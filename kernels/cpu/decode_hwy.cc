#include <cstddef>
#include <cstring>

#include "kernels/cpu/row_walk.h"
#include "kernels/cpu/targets.h"
#include "kernels/decode.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/rotate-inl.h"
#include "kernels/cpu/three_bits-inl.h"
#include "kernels/cpu/vectors-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// No vectors: the reference is as good.
void DecodeTiles(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                 absl::Span<std::byte> scratch) {
  DecodeTilesReference(format, frame, tiles, scratch);
}
void DecodeTileToFloat(const TileFormat& format, Frame frame, const std::byte* record, float* k,
                       float* v) {
  const std::size_t count = std::size_t{format.group} * format.head_dim;
  DecodeTileToFloatReference(format, frame, record, {k, count}, {v, count});
}

#else

// fp16 from the record to fp32.
void LoadScales(const std::byte* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    hn::Store(HalfToFloat<DType::kFloat16>(LoadHalf(from + 2 * i)), Df(), to + i);
  }
}

// Vector i of one token of K: the token's codes are `kBits` bits of each channel's word, from bit
// `shift` on.
template <std::uint32_t kBits>
struct KeyRow {
  const std::uint32_t* words;
  const float* scale;
  const float* zero;
  Vf across;
  int shift;

  HWY_INLINE KeyRow(const std::uint32_t* w, const float* s, const float* z, float t, int bit)
      : words(w), scale(s), zero(z), across(hn::Set(Df(), t)), shift(bit) {}
  HWY_INLINE Vf operator()(std::size_t i) const {
    const Df d;
    const Du32 du;
    const auto shifted = hn::ShiftRightSame(hn::Load(du, words + i * kLanes), shift);
    const auto code = hn::And(shifted, hn::Set(du, (1u << kBits) - 1u));
    const Vf q = hn::ConvertTo(d, hn::BitCast(Di32(), code));
    return hn::Mul(hn::MulAdd(q, hn::Load(d, scale + i * kLanes), hn::Load(d, zero + i * kLanes)),
                   across);
  }
};

// Vector i of one token of V, from codes of a byte each.
struct ValueRow {
  const std::uint8_t* codes;
  const float* across;
  Vf scale, zero;

  HWY_INLINE ValueRow(const std::uint8_t* c, const float* t, float s, float z)
      : codes(c), across(t), scale(hn::Set(Df(), s)), zero(hn::Set(Df(), z)) {}
  HWY_INLINE Vf operator()(std::size_t i) const {
    const Df d;
    const hn::Rebind<std::uint8_t, Df> d8;
    const Vf q = hn::ConvertTo(d, hn::PromoteTo(Di32(), hn::Load(d8, codes + i * kLanes)));
    return hn::Mul(hn::MulAdd(q, scale, zero), hn::Load(d, across + i * kLanes));
  }
};

// kDim packed codes to one byte each.
template <std::size_t kDim, std::uint32_t kBits>
HWY_INLINE void UnpackRow(const std::byte* packed, std::uint8_t* HWY_RESTRICT codes) {
  const hn::FixedTag<std::uint8_t, 16> d;
  const hn::RepartitionToWide<decltype(d)> d16;
  const auto* from = reinterpret_cast<const std::uint8_t*>(packed);
  const auto mask = hn::Set(d, static_cast<std::uint8_t>((1u << kBits) - 1u));
  for (std::size_t i = 0; i < kDim * kBits / 8; i += 16, codes += 16 * 8 / kBits) {
    const auto v = hn::LoadU(d, from + i);
    if constexpr (kBits == 4) {
      const auto even = hn::And(v, mask);
      const auto odd = hn::ShiftRight<4>(v);
      hn::Store(hn::InterleaveLower(d, even, odd), d, codes);
      hn::Store(hn::InterleaveUpper(d, even, odd), d, codes + 16);
    } else {
      const auto c0 = hn::And(v, mask);
      const auto c1 = hn::And(hn::ShiftRight<2>(v), mask);
      const auto c2 = hn::And(hn::ShiftRight<4>(v), mask);
      const auto c3 = hn::ShiftRight<6>(v);
      // Pairs (c0, c1) and (c2, c3) as 16-bit lanes, then those in turn.
      const auto low01 = hn::BitCast(d16, hn::InterleaveLower(d, c0, c1));
      const auto low23 = hn::BitCast(d16, hn::InterleaveLower(d, c2, c3));
      const auto high01 = hn::BitCast(d16, hn::InterleaveUpper(d, c0, c1));
      const auto high23 = hn::BitCast(d16, hn::InterleaveUpper(d, c2, c3));
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d16, low01, low23)), d, codes);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d16, low01, low23)), d, codes + 16);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d16, high01, high23)), d, codes + 32);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d16, high01, high23)), d, codes + 48);
    }
  }
}

// Rows go out in token order: Begin, one Store per vector, End.
template <std::size_t kDim, DType kDType>
class HalfSink {
 public:
  HWY_INLINE HalfSink(const MutableHeadPages& pages, std::size_t rows)
      : pages_(pages), walk_(pages), left_(rows) {}

  HWY_INLINE void Begin() {
    row_ = walk_.Next(--left_ != 0);
    to_ = pages_.channel_stride_bytes == 2 ? row_ : adjacent_;
  }
  HWY_INLINE void Store(std::size_t i, Vf v) {
    StoreHalf(FloatToHalf<kDType>(v), to_ + 2 * i * kLanes);
  }
  HWY_INLINE void End() {
    if (to_ == row_) return;
    for (std::size_t i = 0; i < kDim; ++i) {
      std::memcpy(row_ + static_cast<std::ptrdiff_t>(i) * pages_.channel_stride_bytes,
                  adjacent_ + 2 * i, 2);
    }
  }

 private:
  const MutableHeadPages& pages_;
  RowWalk<std::byte> walk_;
  std::size_t left_;
  std::byte* row_ = nullptr;
  std::byte* to_ = nullptr;
  std::byte adjacent_[2 * kDim];
};

template <std::size_t kDim>
class FloatSink {
 public:
  explicit FloatSink(float* to) : next_(to) {}

  HWY_INLINE void Begin() {
    row_ = next_;
    next_ += kDim;
  }
  HWY_INLINE void Store(std::size_t i, Vf v) { hn::StoreU(v, Df(), row_ + i * kLanes); }
  HWY_INLINE void End() {}

 private:
  float* next_;
  float* row_ = nullptr;
};

template <class Sink>
struct StoreToSink {
  Sink& sink;
  HWY_INLINE void operator()(std::size_t i, Vf v) const { sink.Store(i, v); }
};

template <std::size_t kDim, class Load, class Sink>
HWY_INLINE void EmitRow(const InVectorButterflies& in_vector, Vf norm, bool rotate,
                        const Load& load, Sink& sink) {
  sink.Begin();
  if (rotate) {
    alignas(64) float row[kDim];
    RotateRow<kDim>(in_vector, norm, row, load, StoreToSink<Sink>{sink});
  } else {
    for (std::size_t i = 0; i < kDim / kLanes; ++i) sink.Store(i, load(i));
  }
  sink.End();
}

// `keys`: the codes, of kBits, which are not the record's own where that has 3.
template <std::size_t kDim, std::uint32_t kBits, class Sink>
HWY_NOINLINE void DecodeKeys(const TileFormat& format, bool rotate, const std::byte* record,
                             const std::byte* keys, Sink& sink) {
  const RecordLayout l = LayoutOf(format);
  const InVectorButterflies in_vector;
  const Vf norm = hn::Set(Df(), RotationNorm<kDim>());
  alignas(64) float scale[kDim];
  alignas(64) float zero[kDim];
  alignas(64) float across[kGroupMax];
  alignas(64) std::uint32_t words[kDim];
  LoadScales(record + l.k_scale, kDim, scale);
  LoadScales(record + l.k_zero, kDim, zero);
  LoadScales(record + l.k_token, format.group, across);
  constexpr std::size_t kWordTokens = 32 / kBits;
  const std::size_t row_bytes = std::size_t{format.group} * kBits / 8;
  for (std::size_t t = 0; t < format.group; t += kWordTokens) {
    const std::byte* codes = keys + t * kBits / 8;
    for (std::size_t i = 0; i < kDim; ++i) {
      std::memcpy(words + i, codes + i * row_bytes, sizeof(std::uint32_t));
    }
    for (std::size_t n = 0; n < kWordTokens; ++n) {
      const KeyRow<kBits> load(words, scale, zero, across[t + n], static_cast<int>(n * kBits));
      EmitRow<kDim>(in_vector, norm, rotate, load, sink);
    }
  }
}

template <std::size_t kDim, std::uint32_t kBits, class Sink>
HWY_NOINLINE void DecodeValues(const TileFormat& format, bool rotate, const std::byte* record,
                               Sink& sink) {
  const RecordLayout l = LayoutOf(format);
  const InVectorButterflies in_vector;
  const Vf norm = hn::Set(Df(), RotationNorm<kDim>());
  alignas(64) float scale[kGroupMax];
  alignas(64) float zero[kGroupMax];
  alignas(64) float across[kDim];
  alignas(64) std::uint8_t codes[kDim];
  LoadScales(record + l.v_scale, format.group, scale);
  LoadScales(record + l.v_zero, format.group, zero);
  LoadScales(record + l.v_channel, kDim, across);
  for (std::size_t t = 0; t < format.group; ++t) {
    UnpackRow<kDim, kBits>(record + l.v_codes + t * (kDim * kBits / 8), codes);
    const ValueRow load(codes, across, scale[t], zero[t]);
    EmitRow<kDim>(in_vector, norm, rotate, load, sink);
  }
}

template <std::size_t kDim, class Sink>
void DecodeKeysTo(const TileFormat& format, bool rotate, const std::byte* record, Sink sink) {
  const std::byte* const keys = record + LayoutOf(format).k_codes;
  if (format.key_bits == 2) {
    DecodeKeys<kDim, 2>(format, rotate, record, keys, sink);
  } else if (format.key_bits == 4) {
    DecodeKeys<kDim, 4>(format, rotate, record, keys, sink);
  } else {
    alignas(64) std::byte wide[kDim * kGroupMax / 2];
    WidenRows(keys, kDim, format.group, wide);
    DecodeKeys<kDim, 4>(format, rotate, record, wide, sink);
  }
}

template <std::size_t kDim, class Sink>
void DecodeValuesTo(const TileFormat& format, bool rotate, const std::byte* record, Sink sink) {
  if (format.value_bits == 2) {
    DecodeValues<kDim, 2>(format, rotate, record, sink);
  } else {
    DecodeValues<kDim, 4>(format, rotate, record, sink);
  }
}

template <std::size_t kDim>
void DecodeTile(const TileFormat& format, bool rotate, const DecodeArgs& args) {
  if (args.k.dtype == DType::kFloat16) {
    DecodeKeysTo<kDim>(format, rotate, args.record,
                       HalfSink<kDim, DType::kFloat16>(args.k, format.group));
  } else {
    DecodeKeysTo<kDim>(format, rotate, args.record,
                       HalfSink<kDim, DType::kBFloat16>(args.k, format.group));
  }
  if (args.v.dtype == DType::kFloat16) {
    DecodeValuesTo<kDim>(format, rotate, args.record,
                         HalfSink<kDim, DType::kFloat16>(args.v, format.group));
  } else {
    DecodeValuesTo<kDim>(format, rotate, args.record,
                         HalfSink<kDim, DType::kBFloat16>(args.v, format.group));
  }
}

template <std::size_t kDim>
void DecodeTileToFloats(const TileFormat& format, bool rotate, const std::byte* record, float* k,
                        float* v) {
  DecodeKeysTo<kDim>(format, rotate, record, FloatSink<kDim>(k));
  DecodeValuesTo<kDim>(format, rotate, record, FloatSink<kDim>(v));
}

void DecodeTiles(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                 absl::Span<std::byte> /*scratch*/) {
  const bool rotate = frame == Frame::kModel;
  const auto decode = format.head_dim == 64    ? DecodeTile<64>
                      : format.head_dim == 128 ? DecodeTile<128>
                                               : DecodeTile<256>;
  for (const DecodeArgs& tile : tiles) decode(format, rotate, tile);
}

void DecodeTileToFloat(const TileFormat& format, Frame frame, const std::byte* record, float* k,
                       float* v) {
  const auto decode = format.head_dim == 64    ? DecodeTileToFloats<64>
                      : format.head_dim == 128 ? DecodeTileToFloats<128>
                                               : DecodeTileToFloats<256>;
  decode(format, frame == Frame::kModel, record, k, v);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(DecodeTiles);
HWY_EXPORT(DecodeTileToFloat);

void DecodeTilesCpu(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                    absl::Span<std::byte> scratch) {
  HWY_DYNAMIC_DISPATCH(DecodeTiles)(format, frame, tiles, scratch);
}

void DecodeTileToFloatCpu(const TileFormat& format, Frame frame, const std::byte* record,
                          absl::Span<float> k, absl::Span<float> v) {
  HWY_DYNAMIC_DISPATCH(DecodeTileToFloat)(format, frame, record, k.data(), v.data());
}

}  // namespace kvmill
#endif  // HWY_ONCE
