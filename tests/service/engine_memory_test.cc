// Shared memory of another process: what the daemon maps, and what it refuses.
#include "service/engine_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "client/door_client.h"
#include "client/shared_memory.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

using Holes = SharedRegion::Holes;

std::string Refusal(int fd, std::uint64_t offset, std::uint64_t bytes,
                    Holes holes = Holes::kAllowed) {
  const auto region = SharedRegion::Map(fd, offset, bytes, holes);
  EXPECT_EQ(region.status().code(), absl::StatusCode::kInvalidArgument) << region.status();
  return std::string(region.status().message());
}

OwnedFd Memfd(std::size_t bytes, int seals, unsigned flags = 0) {
  OwnedFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SharedRegionTest, ShowsWhatTheOtherSideWritesFromAnyOffset) {
  auto memory = SharedMemory::Create(100'000);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes(), 102'400u) << "whole pages";
  EXPECT_LT(ftruncate(memory->fd(), 4096), 0) << "it cannot shrink";
  const auto region = SharedRegion::Map(memory->fd(), 4096 + 10, 50'000, Holes::kAllowed);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->bytes(), 50'000u);
  memory->data()[4096 + 10] = std::byte{7};
  memory->data()[4096 + 10 + 49'999] = std::byte{8};
  EXPECT_EQ((*region)->data()[0], std::byte{7});
  EXPECT_EQ((*region)->data()[49'999], std::byte{8});
  // It stays when the other side goes.
  *memory = SharedMemory();
  EXPECT_EQ((*region)->data()[0], std::byte{7});
}

TEST(SharedRegionTest, MemoryThatCouldEndTheProcessIsRefusedByName) {
  const OwnedFd unsealed = Memfd(8192, F_SEAL_GROW);
  EXPECT_THAT(Refusal(unsealed.get(), 0, 8192), HasSubstr("F_SEAL_SHRINK"));
  const OwnedFd sealed = Memfd(8192, F_SEAL_SHRINK);
  EXPECT_TRUE(SharedRegion::Map(sealed.get(), 4096, 4096, Holes::kAllowed).ok());
  EXPECT_THAT(Refusal(sealed.get(), 4096, 4097),
              HasSubstr("shared memory of 8192 bytes, want 4097 from 4096 on"));
  EXPECT_THAT(Refusal(sealed.get(), ~std::uint64_t{0}, 2), HasSubstr("of 8192 bytes"));
  EXPECT_THAT(Refusal(sealed.get(), 0, 0), HasSubstr("want 0"));
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const OwnedFd read_end(ends[0]);
  const OwnedFd write_end(ends[1]);
  EXPECT_THAT(Refusal(ends[0], 0, 1), HasSubstr("must be a memfd"));
  const OwnedFd write_only(
      open(absl::StrCat("/proc/self/fd/", sealed.get()).c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(write_only.valid());
  EXPECT_THAT(Refusal(write_only.get(), 0, 8192), HasSubstr("it must be readable"));
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(ftruncate(fileno(file), 8192), 0);
  const auto of_file = SharedRegion::Map(fileno(file), 0, 8192, Holes::kAllowed);
  EXPECT_EQ(of_file.status().code(), absl::StatusCode::kInvalidArgument) << of_file.status();
  std::fclose(file);
  // Huge pages may have none left when they are read.
  const OwnedFd huge(memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (huge.valid() && ftruncate(huge.get(), 2 << 20) == 0 &&
      fcntl(huge.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0) {
    EXPECT_THAT(Refusal(huge.get(), 0, 2 << 20), HasSubstr("ordinary pages"));
  }
}

std::int64_t PagesOf(int fd) {
  struct stat info {};
  EXPECT_EQ(fstat(fd, &info), 0);
  return info.st_blocks / 8;
}

TEST(SharedRegionTest, ReadingMakesNoPagesInWhatAnotherUserShares) {
  constexpr std::size_t kBytes = 16 * 4096;
  const OwnedFd sparse = Memfd(kBytes, F_SEAL_SHRINK);
  {  // The reason: a page that is not there is made by a read.
    const auto region = SharedRegion::Map(sparse.get(), 0, kBytes, Holes::kAllowed);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ((*region)->data()[4096], std::byte{0});
    EXPECT_EQ(PagesOf(sparse.get()), 1);
  }
  EXPECT_THAT(Refusal(sparse.get(), 0, kBytes, Holes::kNone), HasSubstr("F_SEAL_FUTURE_WRITE"));
  ASSERT_EQ(fcntl(sparse.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
  EXPECT_THAT(Refusal(sparse.get(), 0, kBytes, Holes::kNone),
              HasSubstr("65536 bytes, 4096 of them allocated"));
  ASSERT_EQ(fallocate(sparse.get(), 0, 0, kBytes), 0);
  EXPECT_TRUE(SharedRegion::Map(sparse.get(), 0, kBytes, Holes::kNone).ok());
  EXPECT_EQ(fallocate(sparse.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  EXPECT_EQ(PagesOf(sparse.get()), 16) << "and so it stays";

  // What engines get from us passes, and is theirs to write.
  auto memory = SharedMemory::Create(kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto region = SharedRegion::Map(memory->fd(), 0, kBytes, Holes::kNone);
  ASSERT_TRUE(region.ok()) << region.status();
  memory->data()[0] = std::byte{5};
  EXPECT_EQ((*region)->data()[0], std::byte{5});
  EXPECT_EQ(madvise(memory->data(), 4096, MADV_REMOVE), -1);
}

TEST(EngineMemoryTest, ARegionIsSharedOnceAndWithItsSize) {
  EngineGeometry geometry;
  geometry.regions = {{0x10000, 4096}, {0x20000, 8192}};
  EngineMemory memory(3, geometry);
  const OwnedFd fd = Memfd(8192, F_SEAL_SHRINK);
  const auto share = [&](std::uint32_t region, std::uint64_t bytes) {
    auto mapped = SharedRegion::Map(fd.get(), 0, bytes, Holes::kAllowed);
    EXPECT_TRUE(mapped.ok());
    return memory.Share(region, &*mapped);
  };
  EXPECT_EQ(memory.shared(1), nullptr);
  EXPECT_THAT(share(1, 4096).ToString(), HasSubstr("region 1 of 4096 bytes, it was registered"));
  EXPECT_THAT(share(2, 4096).ToString(), HasSubstr("region 2, want below 2"));
  EXPECT_TRUE(share(1, 8192).ok());
  EXPECT_EQ(share(1, 8192).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(memory.shared(1), nullptr);
  EXPECT_EQ(memory.shared(0), nullptr);
  EXPECT_EQ(memory.shared_regions(), 1u);
  EXPECT_EQ(memory.shared_bytes(), 8192u);
}

TEST(EngineMemoryTest, ARegionIsWhatItWasRegisteredAs) {
  EngineGeometry geometry;
  geometry.regions = {{0x10000, 4096}, {0x20000, 4096}, {0x30000, 4096}, {0x40000, 4096}};
  geometry.regions[1].kind = EngineRegionKind::kPrivate;
  geometry.regions[2].kind = EngineRegionKind::kMemfd;
  geometry.regions[3].kind = EngineRegionKind::kDeviceIpc;
  const OwnedFd fd = Memfd(4096, F_SEAL_SHRINK);
  const auto device = MakeHostDevice();
  const auto allocation = std::make_shared<DeviceAllocation>();
  allocation->handle[5] = std::byte{1};
  allocation->memory = *device->Allocate(8192, "test");
  for (const bool on_device : {false, true}) {
    EngineMemory memory(3, geometry);
    for (std::uint32_t i = 0; i < 4; ++i) {
      auto region = on_device ? SharedRegion::In(allocation, 4096, 4096)
                              : SharedRegion::Map(fd.get(), 0, 4096, Holes::kAllowed);
      ASSERT_TRUE(region.ok()) << region.status();
      const bool fits = on_device ? i == 3 : i == 0 || i == 2;
      EXPECT_EQ(memory.Share(i, &*region).ok(), fits) << on_device << " " << i;
      EXPECT_EQ(memory.shared(i) != nullptr, fits);
    }
    EXPECT_EQ(memory.FindAllocation(IpcHandle{}), nullptr);
    EXPECT_EQ(memory.FindAllocation(allocation->handle), on_device ? allocation : nullptr);
  }
}

TEST(EngineMemoryTest, ARegionLiesInItsAllocationAndKeepsItOpen) {
  const auto device = MakeHostDevice();
  auto allocation = std::make_shared<DeviceAllocation>();
  allocation->memory = *device->Allocate(1, "test");
  const std::uint64_t all = allocation->memory->bytes();
  const std::byte* const begin = allocation->memory->address();
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, all + 1}, {1, all}, {all, 1}, {all + 1, 0}, {0, 0}, {~std::uint64_t{0}, 2}}) {
    EXPECT_EQ(SharedRegion::In(allocation, offset, bytes).status().code(),
              absl::StatusCode::kInvalidArgument)
        << offset << " " << bytes;
  }
  auto region = SharedRegion::In(allocation, 10, all - 10);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->data(), begin + 10);
  EXPECT_EQ((*region)->bytes(), all - 10);
  const std::weak_ptr<DeviceAllocation> open = allocation;
  allocation = nullptr;
  EXPECT_FALSE(open.expired());
  *region = nullptr;
  EXPECT_TRUE(open.expired());
}

}  // namespace
}  // namespace kvmill
