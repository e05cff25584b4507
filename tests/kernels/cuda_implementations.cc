// The CUDA kernels as an implementation for the tests of encode and decode: what the caller's views
// name is copied into the memory of a device, simulated or real, exactly as large as the contract
// says, and back. A fault that the harness finds fails the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda_formats.h"
#include "tests/cuda_harness/harness.h"
#include "tests/kernels/implementations.h"

namespace kvmill {
namespace {

using cuda_harness::DeviceBuffer;
using cuda_harness::Harness;

std::uint32_t NextSeed() {
  static std::uint32_t seed = 0;
  return ++seed;
}

// A list of pages on the device, and where the host's are.
template <typename Byte>
struct DevicePages {
  struct Page {
    Byte* host;
    DeviceBuffer<std::byte> device;
  };
  std::vector<Page> pages;
  BasicHeadPages<Byte> view;

  DevicePages(Harness& harness, const TileFormat& format, const BasicHeadPages<Byte>& host,
              const std::string& name)
      : view(host) {
    std::vector<Byte*> pointers;
    for (std::uint32_t token = 0; token < format.group; token += host.page_tokens) {
      const std::uint32_t tokens = std::min<std::uint32_t>(host.page_tokens, format.group - token);
      const auto last = static_cast<std::size_t>((tokens - 1) * host.token_stride_bytes +
                                                 (format.head_dim - 1) * host.channel_stride_bytes);
      Byte* const from = host.pages[token / host.page_tokens];
      pages.push_back({from, harness.Copy(absl::MakeConstSpan(static_cast<const std::byte*>(from),
                                                              host.offset_bytes + last + 2),
                                          name)});
      pointers.push_back(pages.back().device.data());
    }
    view.pages = harness.Copy(absl::MakeConstSpan(pointers), name + " pages").data();
  }

  void CopyBack() const {
    for (const Page& page : pages) {
      std::memcpy(const_cast<std::byte*>(page.host), page.device.data(), page.device.size());
    }
  }
};

// A record on the device, as far from a multiple of 16 as the host's.
template <typename Byte>
DeviceBuffer<std::byte> DeviceRecord(Harness& harness, const TileFormat& format, Byte* host) {
  const std::size_t misalignment = reinterpret_cast<std::uintptr_t>(host) % 16;
  const DeviceBuffer<std::byte> buffer =
      harness.Allocate<std::byte>(misalignment + RecordBytes(format), "record");
  std::memcpy(buffer.data() + misalignment, host, RecordBytes(format));
  return {buffer.data() + misalignment, RecordBytes(format)};
}

void EncodeOnHarness(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                     absl::Span<EncodeResult> results, absl::Span<std::byte>) {
  Harness harness(NextSeed());
  std::vector<EncodeArgs> args;
  for (const EncodeArgs& tile : tiles) {
    args.push_back({DevicePages(harness, format, tile.k, "k").view,
                    DevicePages(harness, format, tile.v, "v").view,
                    DeviceRecord(harness, format, tile.record).data()});
  }
  const auto device_args = harness.Copy(absl::MakeConstSpan(args), "tiles");
  const auto device_results = harness.Allocate<EncodeResult>(tiles.size(), "results");
  absl::Status status = EncodeTilesCuda(format, frame, device_args.data(), tiles.size(),
                                        device_results.data(), nullptr);
  status.Update(harness.Finish());
  EXPECT_TRUE(status.ok()) << status;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    results[i] = device_results[i];
    std::memcpy(tiles[i].record, args[i].record, RecordBytes(format));
  }
}

void DecodeOnHarness(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                     absl::Span<std::byte>) {
  Harness harness(NextSeed());
  std::vector<DevicePages<std::byte>> halves;
  std::vector<DecodeArgs> args;
  for (const DecodeArgs& tile : tiles) {
    halves.emplace_back(harness, format, tile.k, "k");
    halves.emplace_back(harness, format, tile.v, "v");
    args.push_back({DeviceRecord(harness, format, tile.record).data(),
                    halves[halves.size() - 2].view, halves.back().view});
  }
  const auto device_args = harness.Copy(absl::MakeConstSpan(args), "tiles");
  absl::Status status = DecodeTilesCuda(format, frame, device_args.data(), tiles.size(), nullptr);
  status.Update(harness.Finish());
  EXPECT_TRUE(status.ok()) << status;
  for (const DevicePages<std::byte>& half : halves) half.CopyBack();
}

}  // namespace

// There is no CUDA decoder to fp32: where a test of the encoder wants one, the reference serves.
const std::vector<Implementation>& FastImplementations() {
  static const std::vector<Implementation> cuda{{"cuda", EncodeOnHarness, DecodeOnHarness,
                                                 DecodeTileToFloatReference, "",
                                                 /*simulated=*/true}};
  return cuda;
}

const std::vector<Implementation>& AllImplementations() { return FastImplementations(); }

std::size_t FormatCount() { return kCudaTileFormatCount; }

}  // namespace kvmill
