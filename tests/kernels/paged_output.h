// For tests of the decoders: records with random contents, and engine pages to decode into.
#ifndef KVMILL_TESTS_KERNELS_PAGED_OUTPUT_H_
#define KVMILL_TESTS_KERNELS_PAGED_OUTPUT_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/decode.h"
#include "kernels/packed_codes.h"

namespace kvmill {

// Random codes; scales of either sign and of very different size, subnormals included.
inline std::vector<std::byte> RandomRecord(const TileFormat& format, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> record(RecordBytes(format));
  for (std::byte& b : record) b = static_cast<std::byte>(random());
  const RecordLayout l = LayoutOf(format);
  const auto scales = [&](std::size_t offset, std::size_t count, float size) {
    std::normal_distribution<float> gauss(0, size);
    for (std::size_t i = 0; i < count; ++i) {
      PutFloat16(record.data() + offset, i, FloatToFloat16(gauss(random)));
    }
  };
  scales(l.k_scale, format.head_dim, 0.3f);
  scales(l.k_zero, format.head_dim, 2.0f);
  scales(l.k_token, format.group, 1.0f);
  scales(l.v_channel, format.head_dim, 1e-4f);
  scales(l.v_scale, format.group, 1e-5f);
  scales(l.v_zero, format.group, 1e-4f);
  return record;
}

struct Geometry {
  const char* name;
  std::uint32_t page_tokens;
  std::ptrdiff_t channel_stride_bytes;
  std::size_t row_padding_bytes, page_padding_bytes, offset_bytes;
};

inline constexpr Geometry kGeometries[] = {
    {"one page", 128, 2, 0, 0, 0},
    {"padded pages of 16", 16, 2, 30, 126, 64},
    {"nothing aligned", 16, 2, 3, 7, 5},
    {"channels apart", 32, 6, 0, 0, 2},
    {"pages that do not divide the block", 48, 2, 0, 0, 0},
};

inline constexpr std::byte kUntouched{0xA5};

struct PagedOutput {
  std::vector<std::vector<std::byte>> storage;
  std::vector<std::byte*> pages;
  MutableHeadPages view;  // Without the pages.

  PagedOutput(const Geometry& g, const TileFormat& format, DType dtype) {
    const std::size_t row_bytes =
        format.head_dim * static_cast<std::size_t>(g.channel_stride_bytes) + g.row_padding_bytes;
    for (std::uint32_t t = 0; t < format.group; t += g.page_tokens) {
      storage.emplace_back(g.offset_bytes + g.page_tokens * row_bytes + g.page_padding_bytes,
                           kUntouched);
    }
    for (std::vector<std::byte>& page : storage) pages.push_back(page.data());
    view = {nullptr,
            g.offset_bytes,
            g.page_tokens,
            static_cast<std::ptrdiff_t>(row_bytes),
            g.channel_stride_bytes,
            dtype};
  }

  // Good until the output is moved.
  MutableHeadPages View() {
    MutableHeadPages out = view;
    out.pages = pages.data();
    return out;
  }

  // Takes the values out, leaving kUntouched behind.
  std::vector<std::uint16_t> Take(const TileFormat& format) {
    std::vector<std::uint16_t> values;
    for (std::uint32_t t = 0; t < format.group; ++t) {
      for (std::uint32_t d = 0; d < format.head_dim; ++d) {
        std::byte* at = View().Row(t) + static_cast<std::ptrdiff_t>(d) * view.channel_stride_bytes;
        std::uint16_t bits;
        std::memcpy(&bits, at, 2);
        values.push_back(bits);
        at[0] = at[1] = kUntouched;
      }
    }
    return values;
  }

  bool IsUntouched() const {
    for (const std::vector<std::byte>& page : storage) {
      for (const std::byte b : page) {
        if (b != kUntouched) return false;
      }
    }
    return true;
  }
};

// Three random records (RandomRecord of seeds 0, 1, 2), each off by another byte, and pages for
// them.
struct MisalignedBatch {
  std::vector<std::byte> bytes = std::vector<std::byte>(1);
  std::vector<PagedOutput> outputs;  // K and V of each.
  std::vector<DecodeArgs> args;

  explicit MisalignedBatch(const TileFormat& format) {
    constexpr std::size_t kTiles = 3;
    for (std::uint32_t seed = 0; seed < kTiles; ++seed) {
      const std::vector<std::byte> record = RandomRecord(format, seed);
      bytes.insert(bytes.end(), record.begin(), record.end());
      bytes.emplace_back();
    }
    for (std::size_t i = 0; i < 2 * kTiles; ++i) {
      outputs.emplace_back(kGeometries[1], format, DType::kFloat16);
    }
    for (std::size_t i = 0; i < kTiles; ++i) {
      args.push_back({bytes.data() + 1 + i * (RecordBytes(format) + 1), outputs[2 * i].View(),
                      outputs[2 * i + 1].View()});
    }
  }
  MisalignedBatch(const MisalignedBatch&) = delete;
};

inline std::vector<std::uint16_t> Rounded(const std::vector<float>& values, DType dtype) {
  std::vector<std::uint16_t> out;
  for (const float x : values) out.push_back(FromFloat(x, dtype));
  return out;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_PAGED_OUTPUT_H_
