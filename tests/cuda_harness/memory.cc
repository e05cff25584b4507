#include "tests/cuda_harness/memory.h"

#include <cstring>

namespace kvmill {
namespace cuda_harness {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kRedZoneBytes = 4096;  // On each side; a multiple of kAlignment.

void Map(Region& region, std::size_t bytes_max) {
  const std::size_t mapping_bytes = bytes_max + 2 * kRedZoneBytes;
  region.storage = std::make_unique<std::byte[]>(mapping_bytes + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(region.storage.get());
  region.mapping = (address + kAlignment - 1) / kAlignment * kAlignment;
  region.mapping_bytes = mapping_bytes;
  region.first = region.mapping + kRedZoneBytes;
}

}  // namespace

Memory::Memory() {
  shared_.name = "shared memory";
  shared_.shared = true;
  Map(shared_, kSharedBytesMax);
}

std::byte* Memory::Allocate(std::size_t bytes, const std::string& name) {
  auto region = std::make_unique<Region>();
  region->name = name;
  Map(*region, bytes);
  region->bytes = bytes;
  region->cells.resize(bytes);
  auto* data = reinterpret_cast<std::byte*>(region->first);
  const std::uintptr_t mapping = region->mapping;
  regions_[mapping] = std::move(region);
  return data;
}

std::byte* Memory::OpenShared(std::size_t bytes) {
  shared_.bytes = bytes;
  shared_.cells.assign(bytes, Cell());
  auto* data = reinterpret_cast<std::byte*>(shared_.first);
  std::memset(data, kPoison, bytes);
  return data;
}

Region* Memory::Find(std::uintptr_t address) {
  const auto holds = [address](const Region& region) {
    return address - region.mapping < region.mapping_bytes;
  };
  if (holds(shared_)) return &shared_;
  if (last_ != nullptr && holds(*last_)) return last_;
  const auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  Region* const region = std::prev(after)->second.get();
  if (!holds(*region)) return nullptr;
  last_ = region;
  return region;
}

}  // namespace cuda_harness
}  // namespace kvmill
