// An engine's pages, for tests that store from them: where they lie, what is in them, and blocks of
// them.
#ifndef KVMILL_TESTS_INTEGRATION_ENGINE_PAGES_H_
#define KVMILL_TESTS_INTEGRATION_ENGINE_PAGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/page_store.h"
#include "client/shared_memory.h"
#include "storage/device/device.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {

constexpr std::uint32_t kPageTokens = 16;

// Paged K and V of some heads in memory that a daemon can read: pages of 16 tokens with padding,
// all layers in one region, a page of K and one of V for each layer. Blocks lie in any order.
class EnginePages {
 public:
  // On `device`, one whose memory the CPU can write; null: in shared memory.
  EnginePages(const NamespaceSpec& spec, std::uint32_t page_count, bool heads_first,
              std::uint32_t head_begin, std::uint32_t head_count, Device* device)
      : spec_(spec), head_begin_(head_begin), head_count_(head_count) {
    const LayerGroup& group = spec.groups[0];
    const std::uint64_t row = std::uint64_t{2} * group.head_dim;
    EngineLayers l;
    l.element =
        spec.source_dtype == DType::kFloat16 ? EngineElement::kFloat16 : EngineElement::kBFloat16;
    l.block_tokens = spec.block_tokens;
    l.head_dim = group.head_dim;
    l.head_begin = head_begin;
    l.head_count = head_count;
    l.page_tokens = kPageTokens;
    l.page_count = page_count;
    if (heads_first) {
      l.token_stride_bytes = row + 16;
      l.head_stride_bytes = l.token_stride_bytes * kPageTokens + 32;
      l.page_bytes = l.head_stride_bytes * head_count;
    } else {
      l.head_stride_bytes = row;
      l.token_stride_bytes = row * head_count + 48;
      l.page_bytes = l.token_stride_bytes * kPageTokens;
    }
    l.page_stride_bytes = l.page_bytes + 80;
    const std::uint64_t layer_bytes = l.page_stride_bytes * page_count;
    const std::size_t layers = group.layers.size();
    const std::size_t all_bytes = kLead + 2 * layers * layer_bytes;
    if (device == nullptr) {
      shared_ = *SharedMemory::Create(all_bytes);
      bytes_ = absl::MakeSpan(shared_.data(), shared_.bytes());
    } else {
      on_device_ = *device->Allocate(all_bytes, "engine");
      bytes_ = absl::MakeSpan(on_device_->address(), on_device_->bytes());
    }
    std::memset(bytes_.data(), 0xC5, bytes_.size());
    for (std::size_t i = 0; i < layers; ++i) {
      l.keys.push_back({0, 2 * i * layer_bytes});
      l.values.push_back({0, (2 * i + 1) * layer_bytes});
    }
    geometry.layers = {l};
    EngineRegion region;
    // Neither a page of the system nor the beginning.
    region.base = reinterpret_cast<std::uintptr_t>(bytes_.data()) + kLead;
    region.bytes = 2 * layers * layer_bytes;
    if (device == nullptr) {
      region.fd = shared_.fd();
      region.fd_offset_bytes = kLead;
    } else {
      const IpcMemory exported = *device->ExportIpc(bytes_.data() + kLead, region.bytes);
      region.device_memory = {exported.handle, exported.allocation_bytes, exported.offset_bytes,
                              device->info().uuid};
    }
    geometry.regions = {region};
  }

  std::byte* Page(std::size_t layer, bool value, std::uint64_t page) {
    const EngineLayers& l = geometry.layers[0];
    const EnginePlace& place = value ? l.values[layer] : l.keys[layer];
    return bytes_.data() + kLead + place.offset_bytes + page * l.page_stride_bytes;
  }
  // Where token `token` of a sequence lies, whose page i is pages[i].
  std::byte* Row(std::size_t layer, bool value, const std::vector<std::uint64_t>& pages,
                 std::uint32_t token, std::uint32_t head) {
    const EngineLayers& l = geometry.layers[0];
    return Page(layer, value, pages[token / kPageTokens]) +
           token % kPageTokens * l.token_stride_bytes + head * l.head_stride_bytes;
  }
  void Fill(Sequence& sequence, const std::vector<std::uint64_t>& pages, std::size_t layer_begin,
            std::size_t layer_end) {
    for (std::size_t layer = layer_begin; layer < layer_end; ++layer) {
      for (const bool value : {false, true}) {
        for (std::uint32_t token = 0; token < sequence.token_count(); ++token) {
          for (std::uint32_t head = 0; head < head_count_; ++head) {
            std::memcpy(Row(layer, value, pages, token, head),
                        &sequence.At(layer, value, token, head_begin_ + head, 0),
                        std::size_t{2} * spec_.groups[0].head_dim);
          }
        }
      }
    }
  }
  void FillAll(Sequence& sequence, const std::vector<std::uint64_t>& pages) {
    Fill(sequence, pages, 0, spec_.groups[0].layers.size());
  }
  // Finite values of another kind everywhere.
  void Overwrite() { std::memset(bytes_.data(), 0x35, bytes_.size()); }
  absl::Span<std::byte> bytes() { return bytes_; }

  EngineGeometry geometry;

 private:
  static constexpr std::size_t kLead = 4096 + 64;
  const NamespaceSpec spec_;
  const std::uint32_t head_begin_;
  const std::uint32_t head_count_;
  SharedMemory shared_;
  std::unique_ptr<DeviceMemory> on_device_;
  absl::Span<std::byte> bytes_;
};

// Blocks of a sequence whose page i is pages[i]; keeps what they point to.
struct BlockList {
  BlockList(const NamespaceSpec& spec, const std::string& name, std::uint32_t tokens,
            const std::vector<std::uint64_t>& sequence_pages)
      : pages(sequence_pages) {
    const std::uint32_t count = (tokens + spec.block_tokens - 1) / spec.block_tokens;
    lists.reserve(count);
    for (std::uint32_t b = 0; b < count; ++b) {
      PageBlock block;
      block.key = KeyOf(name, b);
      if (b > 0) block.parent = KeyOf(name, b - 1);
      block.token_count = std::min(spec.block_tokens, tokens - b * spec.block_tokens);
      block.block_index = b;
      lists.emplace_back(
          absl::MakeConstSpan(pages).subspan(b * spec.block_tokens / kPageTokens,
                                             (block.token_count + kPageTokens - 1) / kPageTokens));
      block.pages = absl::MakeConstSpan(&lists.back(), 1);
      blocks.push_back(block);
    }
  }
  std::vector<std::uint64_t> pages;
  std::vector<PageNumbers> lists;
  std::vector<PageBlock> blocks;
};

inline std::vector<std::uint64_t> Shuffled(std::uint32_t count, std::uint32_t seed) {
  std::vector<std::uint64_t> pages(count);
  for (std::uint32_t i = 0; i < count; ++i) pages[i] = i;
  std::mt19937 random(seed);
  std::shuffle(pages.begin(), pages.end(), random);
  return pages;
}

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_ENGINE_PAGES_H_
