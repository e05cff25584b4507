// Blocks on the daemon's GPU, mapped where they are: attended to by another process, kept there
// while they are leased, and never mistaken for others. By default host memory stands in for the
// GPU; with KVMILL_TEST_DEVICE the same runs on a real one.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/mapped_blocks.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/device_attention.h"
#include "tests/integration/raw_reader.h"

#ifndef KVMILL_TEST_DEVICE
#define KVMILL_TEST_DEVICE "host"
#endif

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A device that can do everything but have another process's memory.
class NoImports : public Device {
 public:
  const DeviceInfo& info() const override { return inner_->info(); }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(std::size_t bytes,
                                                         absl::string_view name) override {
    return inner_->Allocate(bytes, name);
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(int, std::size_t) override {
    return absl::InvalidArgumentError("it is memory of another GPU");
  }
  absl::StatusOr<IpcMemory> ExportIpc(const void* start, std::size_t bytes) override {
    return inner_->ExportIpc(start, bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenIpc(const IpcHandle& handle, std::size_t bytes,
                                                        pid_t owner) override {
    return inner_->OpenIpc(handle, bytes, owner);
  }
  absl::Status Pin(absl::Span<std::byte> memory) override { return inner_->Pin(memory); }
  absl::Status PinToRead(absl::Span<const std::byte> memory) override {
    return inner_->PinToRead(memory);
  }
  void Unpin(absl::Span<const std::byte> memory) override { inner_->Unpin(memory); }
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    return inner_->CreateStream();
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return inner_->CreateEvent();
  }
  std::size_t AttendWorkspaceBytes(const AttentionShape& shape, std::size_t sequences,
                                   std::size_t rows, std::uint32_t workers) const override {
    return inner_->AttendWorkspaceBytes(shape, sequences, rows, workers);
  }

 private:
  const std::unique_ptr<Device> inner_ = MakeHostDevice();
};

class GpuMapTest : public DaemonTest {
 protected:
  void SetUp() override {
    DaemonTest::SetUp();
    auto device = OpenDevice(KVMILL_TEST_DEVICE);
    if (!device.ok()) GTEST_SKIP() << "no device: " << device.status().message();
    device_ = *std::move(device);
  }
  void TearDown() override {
    reader_ = nullptr;
    DaemonTest::TearDown();
  }

  // Each tenant needs an arena of 64 MiB on the GPU.
  void Start(const std::string& host_bytes = "64MiB", const std::string& gpu_bytes = "64MiB") {
    DaemonTest::Start(
        {"--host-bytes", host_bytes, "--device", KVMILL_TEST_DEVICE, "--gpu-bytes", gpu_bytes});
    reader_ = ReaderOn(device_.get());
  }
  std::unique_ptr<Client> ReaderOn(Device* device) const {
    Client::Options options;
    options.address = absl::StrCat("unix:", socket());
    options.timeout = absl::Seconds(30);
    options.device = device;
    auto reader = Client::Create(options);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return reader.ok() ? *std::move(reader) : nullptr;
  }
  // Blocks 0 to count - 1 of sequence `name` in namespace "n", on the GPU.
  ClientNamespace Fill(const std::string& name, std::uint32_t count, std::uint32_t seed = 1) {
    const ClientNamespace ns = Open("n", SmallSpec());
    Sequence sequence(SmallSpec(), 64 * count, seed);
    EXPECT_EQ(Put(ns, name, sequence).blocks_stored, count);
    EXPECT_TRUE(AreOnGpu(ns, name, count));
    return ns;
  }
  bool AreOnGpu(const ClientNamespace& ns, const std::string& name, std::uint32_t count) {
    for (int i = 0; i < 3000; ++i) {
      const auto found = client_->Lookup(ns, KeysOf(name, count), {});
      if (found.ok() && found->tiers == std::vector<Tier>(count, Tier::kGpu)) return true;
      usleep(10'000);
    }
    return false;
  }
  std::unique_ptr<DaemonProcess> Attender(const std::string& memory, const std::string& name,
                                          std::uint32_t count, int lease_ms, uid_t uid = 0) {
    return std::make_unique<DaemonProcess>(
        KVMILL_TESTS_DIR "/device_probe",
        std::vector<std::string>{absl::StrCat("unix:", socket()), KVMILL_TEST_DEVICE, memory, name,
                                 absl::StrCat(count), absl::StrCat(lease_ms)},
        uid);
  }
  Client::MappedPtr Map(const ClientNamespace& ns, const std::vector<BlockKey>& keys,
                        PageMemory memory, absl::Duration lease = absl::Seconds(30)) {
    auto mapped = reader_->Map(ns, keys, {.lease = lease, .memory = memory});
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    return mapped.ok() ? *std::move(mapped) : nullptr;
  }
  TierUsage Usage(Tier tier) {
    const auto stat = client_->Stat();
    for (const TierUsage& usage : stat->tiers) {
      if (usage.tier == tier) return usage;
    }
    ADD_FAILURE() << "no such tier";
    return {};
  }
  bool WaitIdle(std::uint64_t sessions) {
    return WaitForStat(
        [sessions](const ServerStat& s) { return s.leases == 0 && s.sessions == sessions; });
  }

  std::unique_ptr<Device> device_;  // Outlives the reader.
  std::unique_ptr<Client> reader_;
};

TEST_F(GpuMapTest, AnotherProcessAttendsToBlocksWhereTheyAreAndKeepsThemThere) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  const std::uint64_t used = Usage(Tier::kGpu).used_bytes;
  const auto probe = Attender("place", "s", 4, 60'000);
  ASSERT_EQ(probe->ReadLine(), "attended to 4 blocks on the GPU");
  EXPECT_EQ(client_->Stat()->leases, 4u);
  EXPECT_EQ(Usage(Tier::kGpu).blocks, 4u);
  EXPECT_EQ(Usage(Tier::kHost).blocks, 0u) << "nothing was demoted for it";
  EXPECT_EQ(Usage(Tier::kGpu).used_bytes, used) << "nor copied";
  // A lease holds the pages on the GPU.
  EXPECT_EQ(*client_->Evict(Tier::kGpu, 0), 0u);
  EXPECT_EQ(Usage(Tier::kGpu).blocks, 4u);
  // The reader dies: everything is given back, and the blocks may go.
  probe->Signal(SIGKILL);
  probe->WaitExit();
  EXPECT_TRUE(WaitIdle(0));
  EXPECT_EQ(Usage(Tier::kGpu).used_bytes, used);
  EXPECT_EQ(*client_->Evict(Tier::kGpu, 0), 4u);
  EXPECT_EQ(Usage(Tier::kGpu).used_bytes, 0u);
  EXPECT_EQ(Usage(Tier::kHost).blocks, 4u);
}

TEST_F(GpuMapTest, BlocksAreBroughtToTheGpuForAReaderThere) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  ASSERT_EQ(*client_->Evict(Tier::kGpu, 0), 4u);
  {
    // Where they are: in host memory.
    const auto in_place = Map(ns, KeysOf("s", 4), PageMemory::kInPlace);
    ASSERT_NE(in_place, nullptr);
    EXPECT_EQ(in_place->memory(0, 0), Tier::kHost);
    EXPECT_TRUE(in_place->VerifyContents().ok()) << in_place->VerifyContents();
    std::vector<GenerationCheck> checks(4);
    EXPECT_THAT(FillGenerationChecks(*in_place, 0, 0, 0, 4, absl::MakeSpan(checks)).ToString(),
                HasSubstr("block 0 is in host memory, where a device cannot check it"));
    // Others use them there, so a copy is made on the GPU.
    const auto on_gpu = Map(ns, KeysOf("s", 4), PageMemory::kGpu);
    ASSERT_NE(on_gpu, nullptr);
    for (std::size_t b = 0; b < 4; ++b) {
      ASSERT_TRUE(on_gpu->status(b).ok()) << on_gpu->status(b);
      EXPECT_EQ(on_gpu->memory(b, 0), Tier::kGpu);
    }
    EXPECT_TRUE(on_gpu->VerifyContents().ok()) << on_gpu->VerifyContents();
    EXPECT_EQ(Usage(Tier::kGpu).blocks, 0u);
    EXPECT_GT(Usage(Tier::kGpu).used_bytes, 0u);
  }
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  std::vector<BlockKey> keys = KeysOf("s", 4);
  keys.push_back(KeyOf("absent", 0));
  const auto mapped = Map(ns, keys, PageMemory::kGpu);
  ASSERT_NE(mapped, nullptr);
  EXPECT_TRUE(absl::IsNotFound(mapped->status(4)));
  EXPECT_EQ(mapped->memory(3, 0), Tier::kGpu);
  EXPECT_EQ(Usage(Tier::kGpu).blocks, 4u);
  EXPECT_TRUE(mapped->VerifyContents().ok()) << mapped->VerifyContents();
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
}

// Its table was made in time, its kernel runs too late: on the stream and off it that is noticed.
TEST_F(GpuMapTest, AReaderPastItsLeaseIsToldOnTheStream) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  auto attention = DeviceAttention::Create(*device_, ns.spec, 4);
  ASSERT_TRUE(attention.ok()) << attention.status();
  Client::MappedPtr mapped;
  absl::StatusOr<DeviceAttention::Result> before = absl::UnknownError("not tried");
  // A machine that stands still may let a lease end before the blocks are attended to.
  absl::Status in_time = before.status();
  for (int lease_ms = 500; !in_time.ok() && lease_ms < 10'000; lease_ms *= 2) {
    mapped = Map(ns, KeysOf("s", 4), PageMemory::kInPlace, absl::Milliseconds(lease_ms));
    ASSERT_NE(mapped, nullptr);
    in_time = (*attention)->Prepare(*mapped, 1);
    if (!in_time.ok()) continue;
    before = (*attention)->Run();
    in_time = mapped->Check();
  }
  ASSERT_TRUE(in_time.ok()) << in_time;
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->changed, 0u);
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  EXPECT_EQ(*client_->Clear(ns), 4u);
  EXPECT_TRUE(WaitForStat([this](const ServerStat&) {  // When the grace is over.
    return Usage(Tier::kGpu).used_bytes == 0;
  }));
  Fill("more", 8, 100);
  const auto after = (*attention)->Run();
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->changed, 4u);
  EXPECT_NE(after->output, before->output) << "other blocks lie there";
  EXPECT_TRUE(absl::IsAborted(mapped->Check())) << mapped->Check();
  EXPECT_TRUE(absl::IsAborted((*attention)->Prepare(*mapped, 1)));
  EXPECT_TRUE(absl::IsAborted(mapped->Page(0, 0, 0).status()));
}

// Whether the process, a child of this one, has ended by itself.
bool HasEnded(const DaemonProcess& process) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(process.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == process.pid();
}

TEST_F(GpuMapTest, AStoppedReaderNeverTakesAnotherBlocksBytesForItsOwn) {
  Start();
  const ClientNamespace ns = Fill("s", 4);
  std::unique_ptr<DaemonProcess> probe;
  // A machine that stands still may let a lease end before it is renewed, and with it the reader.
  for (int lease_ms = 300; probe == nullptr; lease_ms *= 2) {
    ASSERT_LT(lease_ms, 10'000) << "no reader ever renewed its leases";
    probe = Attender("gpu", "s", 4, lease_ms);
    const bool attended = probe->ReadLine() == "attended to 4 blocks on the GPU";
    probe->Signal(SIGSTOP);
    if (attended && !HasEnded(*probe)) break;
    probe = nullptr;
    ASSERT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  }
  EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
  std::uint64_t evicted = 0;  // When the grace is over.
  EXPECT_TRUE(WaitForStat([&](const ServerStat&) {
    evicted += *client_->Evict(Tier::kGpu, 0);
    return evicted == 4;
  })) << evicted;
  Fill("more", 64, 100);  // Its memory becomes others'.
  probe->Signal(SIGCONT);
  EXPECT_THAT(probe->ReadLine(), StartsWith("ABORTED"));
  EXPECT_EQ(probe->WaitExit().code, static_cast<int>(absl::StatusCode::kAborted));
}

TEST_F(GpuMapTest, AClientWithoutTheDeviceIsToldSo) {
  Start();
  const ClientNamespace ns = Fill("s", 2);
  const auto none = client_->Map(ns, KeysOf("s", 2), {.memory = PageMemory::kInPlace});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("Client::Options::device"));
  NoImports other_gpu;
  {
    const auto reader = ReaderOn(&other_gpu);
    for (int i = 0; i < 2; ++i) {
      const auto mapped = reader->Map(ns, KeysOf("s", 2), {.memory = PageMemory::kInPlace});
      ASSERT_TRUE(mapped.ok()) << mapped.status();
      EXPECT_EQ((*mapped)->status(1).code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string((*mapped)->status(1).message()),
                  HasSubstr("cannot be used on host: it is memory of another GPU"));
      EXPECT_EQ((*mapped)->Page(1, 0, 0).status(), (*mapped)->status(1));
      EXPECT_TRUE((*mapped)->Check().ok());
      EXPECT_TRUE(WaitForStat([](const ServerStat& s) { return s.leases == 0; }));
    }
    // The way that is left.
    const auto copy = reader->Map(ns, KeysOf("s", 2), {});
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_TRUE((*copy)->VerifyContents().ok()) << (*copy)->VerifyContents();
  }
  EXPECT_TRUE(WaitIdle(0));
}

TEST_F(GpuMapTest, TheGpusMemoryGoesOnlyToThoseWhoHoldALeaseInIt) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to act as another user";
  Start("256MiB", "128MiB");
  LetOthersIn();
  EXPECT_EQ(Probe({"store", "s", "2"}, 65534)->ReadLine(), "stored 2");  // A tenant of its own.
  const ClientNamespace ns = Fill("s", 2);
  const auto owner = Attender("gpu", "s", 2, 60'000, 65534);
  ASSERT_EQ(owner->ReadLine(), "attended to 2 blocks on the GPU");
  RawReader reader(socket(), ns);
  const MapReplyContent content = reader.Map(ns.spec, KeysOf("s", 2), PageMemory::kInPlace);
  ASSERT_EQ(content.arenas.size(), 1u);
  const ArenaId own = content.arenas[0].id;
  EXPECT_EQ(own.tier, Tier::kGpu);
  for (std::uint64_t lease = 0; lease <= content.blocks[1].lease; ++lease) {
    for (std::uint32_t arena = 0; arena < 4; ++arena) {
      for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
        const bool may =
            lease >= content.blocks[0].lease && arena == own.arena && epoch == own.epoch;
        EXPECT_EQ(reader.Arena(lease, {Tier::kGpu, arena, epoch}).ok(), may)
            << lease << " " << arena << " " << epoch;
      }
    }
  }
  EXPECT_FALSE(reader.Arena(content.blocks[0].lease, {Tier::kHost, own.arena, own.epoch}).ok());
  RawReader neighbour(socket(), ns);
  EXPECT_FALSE(neighbour.Arena(content.blocks[0].lease, own).ok());
  // Both descriptors are of sealed memory, when host memory stands in.
  const auto memory = reader.Arena(content.blocks[0].lease, own);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE(memory->generations.valid());
  std::vector<int> fds = {memory->generations.get()};
  if (device_->info().host_accessible) fds.push_back(memory->fd.get());
  for (const int fd : fds) {
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    EXPECT_EQ(pwrite(fd, "x", 1, 0), -1);
    EXPECT_EQ(ftruncate(fd, 0), -1);
  }
}

TEST_F(GpuMapTest, ThreeQuartersOfTheGpuCanBeUnderLease) {
  Start();
  const ClientNamespace ns = Fill("s", 100);
  std::vector<Client::MappedPtr> held;
  absl::Status refused;
  while (refused.ok() && held.size() < 1000) {  // The same blocks: every lease counts.
    auto mapped = reader_->Map(ns, KeysOf("s", 100), {.memory = PageMemory::kGpu});
    refused = mapped.status();
    if (mapped.ok()) held.push_back(*std::move(mapped));
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes under lease on the GPU and"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 50331648"));
  EXPECT_TRUE(held.back()->Check().ok()) << held.back()->Check();
  // Host memory is counted by itself.
  EXPECT_TRUE(reader_->Map(ns, KeysOf("s", 100), {}).ok());
}

}  // namespace
}  // namespace kvmill::testing
