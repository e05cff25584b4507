// What a client does with a daemon's arena on a GPU, step by step, until the first error.
#ifndef KVMILL_TESTS_CLIENT_TRANSPORT_IMPORTED_ARENA_H_
#define KVMILL_TESTS_CLIENT_TRANSPORT_IMPORTED_ARENA_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "client/transport/imported_arena.h"
#include "storage/core/status_macros.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {

// The daemon's side: an arena on the device, word i of it EngineWord(i), and generations in sealed
// host memory, word 1 of them 6.
class DaemonArena {
 public:
  static constexpr std::size_t kBytes = std::size_t{4} << 20;
  static constexpr std::size_t kGenerationBytes = std::size_t{2} << 20;

  static absl::StatusOr<std::unique_ptr<DaemonArena>> Create(Device& device) {
    auto arena = std::make_unique<DaemonArena>();
    KVMILL_ASSIGN_OR_RETURN(arena->memory, device.Allocate(kBytes, "arena"));
    KVMILL_ASSIGN_OR_RETURN(const auto stream, device.CreateStream());
    std::vector<std::uint32_t> words(kBytes / sizeof(std::uint32_t));
    for (std::uint32_t i = 0; i < words.size(); ++i) words[i] = EngineWord(i);
    KVMILL_RETURN_IF_ERROR(stream->Copy(arena->memory->address(), words.data(), kBytes));
    KVMILL_RETURN_IF_ERROR(stream->Synchronize());
    KVMILL_ASSIGN_OR_RETURN(arena->generations,
                            arena->host->Allocate(kGenerationBytes, "generations"));
    arena->set_generation(6);
    return arena;
  }
  void set_generation(std::uint64_t generation) {
    std::memcpy(generations->address() + 8, &generation, sizeof(generation));
  }

  std::unique_ptr<Device> host = MakeHostDevice();
  std::unique_ptr<DeviceMemory> memory;
  std::unique_ptr<DeviceMemory> generations;
};

// The client's mapping of the generations.
class GenerationMapping {
 public:
  explicit GenerationMapping(int fd)
      : data_(mmap(nullptr, DaemonArena::kGenerationBytes, PROT_READ, MAP_SHARED, fd, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~GenerationMapping() { munmap(data_, DaemonArena::kGenerationBytes); }
  absl::Span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(data_), DaemonArena::kGenerationBytes};
  }

 private:
  void* const data_;
};

// Imports the arena, reads pieces of it, and looks at a generation on a stream before and after the
// daemon changes it.
inline absl::Status UseArena(Device& device, DaemonArena& daemon) {
  KVMILL_ASSIGN_OR_RETURN(const auto reader, DeviceReader::Create(device));
  const GenerationMapping mapping(daemon.generations->fd());
  KVMILL_ASSIGN_OR_RETURN(
      const auto arena,
      ImportedArena::Create(*reader, daemon.memory->fd(), DaemonArena::kBytes, mapping.bytes()));
  // Many small ones, and one that is larger than any buffer.
  std::vector<std::uint32_t> all(DaemonArena::kBytes / 4);
  std::vector<DeviceReader::Piece> pieces;
  const auto bytes = absl::MakeSpan(reinterpret_cast<std::byte*>(all.data()), DaemonArena::kBytes);
  std::size_t at = 0;
  for (; at < 100 * 192; at += 192)
    pieces.push_back({arena->address() + at, bytes.subspan(at, 192)});
  pieces.push_back({arena->address() + at, bytes.subspan(at, 0)});
  pieces.push_back({arena->address() + at, bytes.subspan(at)});
  KVMILL_RETURN_IF_ERROR(reader->Read(pieces));
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    if (all[i] != EngineWord(i)) return absl::DataLossError(absl::StrCat("word ", i));
  }
  DeviceImage image(device, 4096);
  const GenerationCheck* checks = image.Put(std::vector<GenerationCheck>{
      {reinterpret_cast<const std::uint64_t*>(mapping.bytes().data() + 8), 6}});
  auto* changed = image.Put(std::vector<std::uint32_t>{0});
  KVMILL_ASSIGN_OR_RETURN(const auto stream, device.CreateStream());
  std::uint32_t seen[2] = {};
  for (std::uint32_t& s : seen) {
    KVMILL_RETURN_IF_ERROR(image.Upload(*stream));
    KVMILL_RETURN_IF_ERROR(stream->CheckGenerations(checks, 1, changed));
    KVMILL_RETURN_IF_ERROR(stream->Copy(&s, changed, sizeof(s)));
    KVMILL_RETURN_IF_ERROR(stream->Synchronize());
    daemon.set_generation(9);
  }
  daemon.set_generation(6);
  if (seen[0] != 0 || seen[1] != 1) {
    return absl::DataLossError(absl::StrCat("changes ", seen[0], " and ", seen[1]));
  }
  return absl::OkStatus();
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLIENT_TRANSPORT_IMPORTED_ARENA_H_
