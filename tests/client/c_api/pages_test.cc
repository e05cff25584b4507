// client/kvmill_engine.h: stores from registered pages. client/kvmill_map.h: blocks on a GPU, for
// which host memory stands in.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint64_t kPages = SmallBlock::kTokens / kPageTokens;
constexpr std::uint64_t kTokenBytes = std::uint64_t{2} * SmallBlock::kHeads * SmallBlock::kHeadDim;
constexpr std::uint64_t kPageBytes = kPageTokens * kTokenBytes;
constexpr std::uint64_t kNumbers[kPages] = {2, 0, 3, 1};  // The engine's pages of a block.

// K and V of each layer, each kPages pages, one after the other.
class PageStores : public CApiTest {
 protected:
  void SetUp() override {
    CApiTest::SetUp();
    ns_ = Open(::testing::UnitTest::GetInstance()->current_test_info()->name());
    ASSERT_EQ(kvmill_shared_memory_create(4 * kPages * kPageBytes + 4096, &memory_), KVMILL_OK)
        << kvmill_last_error();
    for (std::uint64_t i = 0; i < 2; ++i) {
      keys_[i] = {2 * i * kPages * kPageBytes, 0, 0};
      values_[i] = {(2 * i + 1) * kPages * kPageBytes, 0, 0};
    }
    layers_ = Init<kvmill_engine_layers>();
    layers_.keys = keys_;
    layers_.values = values_;
    layers_.layer_count = 2;
    layers_.element = KVMILL_ELEMENT_BFLOAT16;
    layers_.block_tokens = SmallBlock::kTokens;
    layers_.head_dim = SmallBlock::kHeadDim;
    layers_.head_count = SmallBlock::kHeads;
    layers_.page_tokens = kPageTokens;
    layers_.page_count = kPages;
    layers_.page_bytes = layers_.page_stride_bytes = kPageBytes;
    layers_.token_stride_bytes = kTokenBytes;
    layers_.head_stride_bytes = 2 * SmallBlock::kHeadDim;
    region_ = {reinterpret_cast<std::uintptr_t>(data()), 4 * kPages * kPageBytes};
    source_ = Init<kvmill_region_source>();
    source_.kind = KVMILL_REGION_MEMFD;
    source_.fd = kvmill_shared_memory_fd(memory_);
    source_.offset_bytes = 4096;
    geometry_ = Init<kvmill_engine_geometry>();
    geometry_.regions = &region_;
    geometry_.region_count = 1;
    geometry_.layers = &layers_;
    geometry_.layers_count = 1;
    geometry_.sources = &source_;
    geometry_.source_count = 1;
  }
  void TearDown() override {
    kvmill_shared_memory_free(memory_);
    kvmill_namespace_free(ns_);
    CApiTest::TearDown();
  }
  std::byte* data() const {
    return static_cast<std::byte*>(kvmill_shared_memory_data(memory_)) + 4096;
  }
  // Of one layer, or of both.
  void Fill(const SmallBlock& block, std::size_t first = 0, std::size_t last = 2) {
    for (std::size_t half = 2 * first; half < 2 * last; ++half) {
      for (std::uint64_t page = 0; page < kPages; ++page) {
        std::memcpy(data() + (half * kPages + kNumbers[page]) * kPageBytes,
                    block.values[half].data() + page * kPageBytes / 2, kPageBytes);
      }
    }
  }
  std::uint64_t Register() {
    const Outcome outcome =
        Finish(kvmill_register_memory(client_, ns_, &geometry_, nullptr, queue_, 1));
    EXPECT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
    std::uint64_t registration = 0;
    EXPECT_EQ(kvmill_result_count(outcome.result.get(), &registration), KVMILL_OK);
    return registration;
  }
  kvmill_page_block BlockOfPages(const std::string& key) const {
    auto block = Init<kvmill_page_block>();
    block.key = Key(key);
    block.token_count = SmallBlock::kTokens;
    block.pages = &pages_;
    block.group_count = 1;
    return block;
  }
  // Whole pages of both layers.
  std::vector<std::vector<std::byte>> PagesOf(const std::string& key) {
    std::vector<std::vector<std::byte>> pages(2);
    std::vector<kvmill_fetch_output> outputs(2, Init<kvmill_fetch_output>());
    for (std::size_t i = 0; i < 2; ++i) {
      pages[i].resize(kvmill_namespace_page_bytes_max(ns_, i));
      outputs[i].data = pages[i].data();
      outputs[i].data_bytes = pages[i].size();
    }
    auto options = Init<kvmill_fetch_options>();
    options.form = KVMILL_FORM_PAGES;
    const kvmill_key k = Key(key);
    const Outcome outcome =
        Finish(kvmill_fetch(client_, ns_, &k, 1, outputs.data(), 2, &options, nullptr, queue_, 2));
    if (BlockOf(outcome).code != KVMILL_OK) return {};
    for (std::size_t i = 0; i < 2; ++i) {
      std::size_t bytes = 0;
      EXPECT_EQ(kvmill_result_page_bytes(outcome.result.get(), 0, i, &bytes), KVMILL_OK);
      pages[i].resize(bytes);
    }
    return pages;
  }
  // What is refused before anything starts.
  std::string Refusal(kvmill_code code) {
    EXPECT_EQ(code, KVMILL_INVALID_ARGUMENT);
    EXPECT_EQ(kvmill_queue_running(queue_), 0u);
    return kvmill_last_error();
  }

  kvmill_namespace* ns_ = nullptr;
  kvmill_shared_memory* memory_ = nullptr;
  kvmill_engine_place keys_[2] = {};
  kvmill_engine_place values_[2] = {};
  kvmill_engine_layers layers_ = {};
  kvmill_engine_region region_ = {};
  kvmill_region_source source_ = {};
  kvmill_engine_geometry geometry_ = {};
  const kvmill_page_numbers pages_ = {kNumbers, kPages};
};

TEST_F(PageStores, PagesBecomeTheBytesThatACopyBecomes) {
  const SmallBlock values(7);
  const std::string key = "key";
  Put(ns_, key, values);
  const auto want = PagesOf(key);
  ASSERT_EQ(want.size(), 2u);
  ASSERT_EQ(Finish(kvmill_clear(client_, ns_, nullptr, queue_, 3)).event.code, KVMILL_OK);
  ASSERT_TRUE(PagesOf(key).empty());

  const std::uint64_t registration = Register();
  Fill(values);
  const kvmill_page_block block = BlockOfPages(key);
  const Outcome outcome = Finish(
      kvmill_store_pages(client_, ns_, registration, &block, 1, nullptr, nullptr, queue_, 4));
  EXPECT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
  EXPECT_EQ(outcome.event.operation, static_cast<kvmill_operation>(KVMILL_STORE_PAGES));
  EXPECT_EQ(BlockOf(outcome).code, KVMILL_OK) << BlockOf(outcome).message;
  EXPECT_EQ(BlockOf(outcome).outcome, static_cast<std::uint32_t>(KVMILL_BLOCK_STORED));
  auto store = Init<kvmill_store_result>();
  ASSERT_EQ(kvmill_result_store(outcome.result.get(), &store), KVMILL_OK);
  EXPECT_EQ(store.blocks_stored, 1u);
  EXPECT_EQ(store.raw_bytes, 4 * kPages * kPageBytes);
  EXPECT_EQ(PagesOf(key), want);
  EXPECT_EQ(Finish(kvmill_unregister_memory(client_, registration, nullptr, queue_, 5)).event.code,
            KVMILL_OK);
  EXPECT_EQ(
      Finish(kvmill_store_pages(client_, ns_, registration, &block, 1, nullptr, nullptr, queue_, 6))
          .event.code,
      KVMILL_NOT_FOUND);
}

TEST_F(PageStores, LayersAreReadWhenTheyAreReadyAndFlushedPagesAreFree) {
  const SmallBlock values(8);
  const std::string key = "key";
  Put(ns_, key, values);
  const auto want = PagesOf(key);
  ASSERT_EQ(Finish(kvmill_clear(client_, ns_, nullptr, queue_, 3)).event.code, KVMILL_OK);
  const std::uint64_t registration = Register();
  std::memset(data(), 0xFF, 4 * kPages * kPageBytes);  // NaN.
  const kvmill_page_block block = BlockOfPages(key);
  auto options = Init<kvmill_page_store_options>();
  options.request = 9;
  options.by_layer = 1;
  ASSERT_EQ(kvmill_store_pages(client_, ns_, registration, &block, 1, &options, nullptr, queue_, 4),
            KVMILL_OK)
      << kvmill_last_error();
  auto event = Init<kvmill_event>();
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(kvmill_queue_next(queue_, 30, &event), KVMILL_DEADLINE_EXCEEDED);
    Fill(values, layer, layer + 1);
    EXPECT_EQ(kvmill_ready_pages(client_, 9, layer + 1), KVMILL_OK);
  }
  ASSERT_EQ(kvmill_queue_next(queue_, 60000, &event), KVMILL_OK);
  EXPECT_EQ(event.code, KVMILL_OK) << kvmill_result_message(event.result);
  kvmill_result_free(event.result);
  EXPECT_EQ(PagesOf(key), want);

  // Never ready: given up, by each of the three.
  const auto give_up = [&](int way) {
    switch (way) {
      case 0:
        return kvmill_flush_pages(client_, 9, nullptr, queue_, 20);
      case 1:
        return kvmill_flush_blocks(client_, &block.key, 1, nullptr, queue_, 20);
      default:
        return kvmill_cancel_pages(client_, 9, nullptr, queue_, 20);
    }
  };
  for (int way = 0; way < 3; ++way) {
    ASSERT_EQ(Finish(kvmill_clear(client_, ns_, nullptr, queue_, 3)).event.code, KVMILL_OK);
    ASSERT_EQ(
        kvmill_store_pages(client_, ns_, registration, &block, 1, &options, nullptr, queue_, 10),
        KVMILL_OK);
    EXPECT_EQ(kvmill_ready_pages(client_, 9, 1), KVMILL_OK);
    ASSERT_EQ(give_up(way), KVMILL_OK) << kvmill_last_error();
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(kvmill_queue_next(queue_, 60000, &event), KVMILL_OK);
      if (event.tag == 20) {
        EXPECT_EQ(event.code, KVMILL_OK) << kvmill_result_message(event.result);
        EXPECT_EQ(event.operation, static_cast<kvmill_operation>(way == 2 ? KVMILL_CANCEL_PAGES
                                                                          : KVMILL_FLUSH_PAGES));
      } else {
        EXPECT_EQ(event.code, KVMILL_OK) << kvmill_result_message(event.result);
        auto said = Init<kvmill_block_result>();
        EXPECT_EQ(kvmill_result_block(event.result, 0, &said), KVMILL_OK);
        EXPECT_EQ(said.code, KVMILL_CANCELLED) << said.message;
        EXPECT_EQ(said.outcome, static_cast<std::uint32_t>(KVMILL_BLOCK_FAILED));
        EXPECT_EQ(std::string(said.message).find(way == 2 ? "CancelPages" : "FlushPages"), 0u);
      }
      kvmill_result_free(event.result);
    }
    EXPECT_TRUE(PagesOf(key).empty());
  }
}

TEST_F(PageStores, WhatIsWrongIsNamed) {
  const std::uint64_t registration = Register();
  const std::string key = "key";
  kvmill_page_block block = BlockOfPages(key);
  const auto store = [&](const kvmill_page_store_options* options) {
    return kvmill_store_pages(client_, ns_, registration, &block, 1, options, nullptr, queue_, 1);
  };
  auto options = Init<kvmill_page_store_options>();
  options.ready_layers = 1;
  EXPECT_EQ(Refusal(store(&options)), "ready_layers 1 without by_layer");
  block.group_count = 2;
  EXPECT_EQ(Refusal(store(nullptr)), "block 0: group_count 2, the namespace has 1 layer groups");
  block = BlockOfPages(key);
  block.pages = nullptr;
  EXPECT_EQ(Refusal(store(nullptr)), "block 0: pages is null");
  const kvmill_page_numbers null_numbers = {nullptr, 4};
  block.pages = &null_numbers;
  EXPECT_EQ(Refusal(store(nullptr)), "block 0: numbers is null");
  const kvmill_page_numbers many = {kNumbers, std::size_t{1} << 40};
  block.pages = &many;
  EXPECT_EQ(Refusal(store(nullptr)), "block 0: group 0: 1099511627776 pages, at most 64");
  EXPECT_EQ(Refusal(kvmill_store_pages(client_, ns_, registration, nullptr, 1, nullptr, nullptr,
                                       queue_, 1)),
            "blocks is null");
  EXPECT_EQ(Refusal(kvmill_ready_pages(nullptr, 1, 1)), "client is null");
  EXPECT_EQ(Refusal(kvmill_cancel_pages(nullptr, 1, nullptr, queue_, 1)), "client is null");
  EXPECT_EQ(Refusal(kvmill_flush_pages(client_, 1, nullptr, nullptr, 1)), "queue is null");
  EXPECT_EQ(Refusal(kvmill_shared_memory_create(4096, nullptr)), "memory is null");
  kvmill_shared_memory* none = memory_;
  EXPECT_EQ(Refusal(kvmill_shared_memory_create(0, &none)), "shared memory of 0 bytes");
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(kvmill_shared_memory_data(nullptr), nullptr);
  EXPECT_EQ(kvmill_shared_memory_bytes(nullptr), 0u);
  EXPECT_EQ(kvmill_shared_memory_fd(nullptr), -1);
  // Only the daemon can know.
  block = BlockOfPages(key);
  const std::uint64_t beyond[kPages] = {0, 1, 2, kPages};
  const kvmill_page_numbers wrong = {beyond, kPages};
  block.pages = &wrong;
  const Outcome outcome = Finish(store(nullptr));
  EXPECT_STREQ(BlockOf(outcome).message, "block 0: page number 4, want below 4");

  const auto refusal = [&] {
    return Refusal(kvmill_register_memory(client_, ns_, &geometry_, nullptr, queue_, 1));
  };
  geometry_.source_count = 2;
  EXPECT_EQ(refusal(), "source_count 2, want 1, one a region, or 0");
  geometry_.source_count = 1;
  source_.kind = 3;
  EXPECT_EQ(refusal(), "source 0: kind 3, want 0 to 2");
  source_.kind = KVMILL_REGION_MEMFD;
  source_.fd = -1;
  EXPECT_EQ(refusal(), "source 0: fd -1");
  // A caller of before: no sources, so nothing that can be stored from.
  geometry_.struct_bytes = offsetof(kvmill_engine_geometry, sources);
  block = BlockOfPages(key);
  const std::uint64_t private_memory = Register();
  EXPECT_STREQ(BlockOf(Finish(kvmill_store_pages(client_, ns_, private_memory, &block, 1, nullptr,
                                                 nullptr, queue_, 1)))
                   .message,
               "block 0: region 0 of the registration is not shared");
  // A GPU's, where there is none.
  geometry_.struct_bytes = sizeof(geometry_);
  source_.kind = KVMILL_REGION_DEVICE_IPC;
  const Outcome refused =
      Finish(kvmill_register_memory(client_, ns_, &geometry_, nullptr, queue_, 1));
  EXPECT_EQ(refused.event.code, KVMILL_FAILED_PRECONDITION);
  EXPECT_EQ(refused.message().find("regions[0] is memory of a GPU"), 0u) << refused.message();
}

TEST_F(PageStores, AChildOfForkIsToldSo) {
  const pid_t child = fork();
  if (child == 0) {
    const bool right =
        kvmill_ready_pages(client_, 1, 1) == KVMILL_FAILED_PRECONDITION &&
        kvmill_cancel_pages(client_, 1, nullptr, queue_, 1) == KVMILL_FAILED_PRECONDITION;
    kvmill_shared_memory_free(memory_);  // Not its mapping.
    _exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// A client with a device, and a daemon whose GPU is host memory.
class Devices : public CApiTest {
 protected:
  static std::string socket() { return directory() / "run/kvmill.sock"; }
  static const TemporaryDirectory& directory() {
    static const TemporaryDirectory the;
    return the;
  }
  static bool IsLoaded(const std::string& library) {
    std::ifstream maps("/proc/self/maps");
    const std::string all((std::istreambuf_iterator<char>(maps)), std::istreambuf_iterator<char>());
    return all.find(library) != std::string::npos;
  }
  kvmill_code Create(const char* device, kvmill_client** client) {
    const std::string to = "unix:" + socket();
    auto options = Init<kvmill_client_options>();
    options.address = to.c_str();
    options.timeout_ms = 60000;
    options.device = device;
    return kvmill_client_create(&options, client);
  }
};

TEST_F(Devices, WhatIsMissingIsSaid) {
  kvmill_client* client = nullptr;
  EXPECT_EQ(Create("nonsense", &client), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(kvmill_last_error()).find("device nonsense: "), 0u) << kvmill_last_error();
  EXPECT_EQ(Create(std::string(65, 'x').c_str(), &client), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(Create("auto", &client), KVMILL_INVALID_ARGUMENT);
  // CUDA comes with a library of its own, when somebody asks for it.
  EXPECT_FALSE(IsLoaded("libcuda"));
  EXPECT_FALSE(IsLoaded("libkvmill_cuda"));
  EXPECT_EQ(Create("cuda:63", &client), KVMILL_UNAVAILABLE) << kvmill_last_error();
#ifdef KVMILL_TEST_HAS_CUDA
  EXPECT_TRUE(IsLoaded("libkvmill_cuda")) << kvmill_last_error();
#endif
  EXPECT_EQ(client, nullptr);
  auto source = Init<kvmill_region_source>();
  int here = 0;
  EXPECT_EQ(kvmill_export_memory(client_, &here, 4, &source), KVMILL_FAILED_PRECONDITION);
  EXPECT_EQ(kvmill_export_memory(nullptr, &here, 4, &source), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_export_memory(client_, &here, 4, nullptr), KVMILL_INVALID_ARGUMENT);
  ASSERT_EQ(Create("host", &client), KVMILL_OK) << kvmill_last_error();
  EXPECT_EQ(kvmill_export_memory(client, &here, 4, &source), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_client_destroy(client), KVMILL_OK);
  // A map that needs one.
  kvmill_namespace* const ns = Open("devices");
  const std::string key = "key";
  const kvmill_key k = Key(key);
  auto options = Init<kvmill_map_options>();
  options.memory = KVMILL_MEMORY_IN_PLACE;
  EXPECT_EQ(Finish(kvmill_map(client_, ns, &k, 1, &options, nullptr, queue_, 1)).event.code,
            KVMILL_FAILED_PRECONDITION);
  options.memory = KVMILL_MEMORY_GPU + 1;
  EXPECT_EQ(kvmill_map(client_, ns, &k, 1, &options, nullptr, queue_, 1), KVMILL_INVALID_ARGUMENT);
  EXPECT_STREQ(kvmill_last_error(), "memory 3, want 0 to 2");
  kvmill_namespace_free(ns);
}

TEST_F(Devices, BlocksOnTheGpuAreAddressesOfTheDevice) {
  DaemonProcess daemon(DaemonBinary(), {"--socket", socket(), "--host-bytes", "64MiB", "--device",
                                        "host", "--gpu-bytes", "64MiB"});
  ASSERT_FALSE(daemon.WaitReady().is_null()) << daemon.standard_error();
  kvmill_client* client = nullptr;
  ASSERT_EQ(Create("host", &client), KVMILL_OK) << kvmill_last_error();
  std::swap(client, client_);
  kvmill_namespace* const ns = Open("gpu");
  const std::string key = "key";
  const kvmill_key k = Key(key);
  Put(ns, key, SmallBlock(5));
  std::vector<std::byte> records(2 * kvmill_namespace_record_bytes(ns, 0));
  std::vector<kvmill_fetch_output> outputs(2, Init<kvmill_fetch_output>());
  std::vector<std::byte> second(records.size());
  outputs[0].data = records.data();
  outputs[1].data = second.data();
  outputs[0].data_bytes = outputs[1].data_bytes = records.size();
  auto form = Init<kvmill_fetch_options>();
  form.form = KVMILL_FORM_RECORDS;
  ASSERT_EQ(BlockOf(Finish(kvmill_fetch(client_, ns, &k, 1, outputs.data(), 2, &form, nullptr,
                                        queue_, 2)))
                .code,
            KVMILL_OK);

  auto options = Init<kvmill_map_options>();
  options.memory = KVMILL_MEMORY_GPU;
  options.lease_ms = 30000;
  kvmill_mapped* mapped = nullptr;
  {
    const Outcome outcome = Finish(kvmill_map(client_, ns, &k, 1, &options, nullptr, queue_, 3));
    ASSERT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
    ASSERT_EQ(kvmill_result_mapped(outcome.result.get(), &mapped), KVMILL_OK);
  }
  std::uint32_t tier = 99;
  ASSERT_EQ(kvmill_mapped_memory(mapped, 0, 0, &tier), KVMILL_OK) << kvmill_last_error();
  EXPECT_EQ(tier, static_cast<std::uint32_t>(KVMILL_TIER_GPU));
  EXPECT_EQ(kvmill_mapped_memory(mapped, 1, 0, &tier), KVMILL_OUT_OF_RANGE);
  EXPECT_EQ(kvmill_mapped_memory(mapped, 0, 2, &tier), KVMILL_OUT_OF_RANGE);
  EXPECT_EQ(kvmill_mapped_memory(mapped, 0, 0, nullptr), KVMILL_INVALID_ARGUMENT);
  kvmill_mapped_head heads[2];
  ASSERT_EQ(kvmill_mapped_heads(mapped, 0, 0, 1, heads, 2), KVMILL_OK) << kvmill_last_error();
  for (std::size_t h = 0; h < 2; ++h) {
    ASSERT_EQ(heads[h].bytes, records.size() / 2);
    // The device's memory is this host's.
    EXPECT_EQ(std::memcmp(heads[h].data, records.data() + h * heads[h].bytes, heads[h].bytes), 0);
  }
  EXPECT_EQ(kvmill_mapped_check(mapped, 0, 1), KVMILL_OK) << kvmill_last_error();
  EXPECT_EQ(kvmill_mapped_verify(mapped), KVMILL_OK) << kvmill_last_error();
  // Attention here is the CPU's.
  std::vector<float> query(2 * 64, 1), output(2 * 64);
  auto attention = Init<kvmill_attention>();
  attention.query = query.data();
  attention.output = output.data();
  attention.q_heads = 2;
  EXPECT_EQ(kvmill_attend(mapped, 0, &attention), KVMILL_FAILED_PRECONDITION);
  EXPECT_EQ(std::string(kvmill_last_error()).find("block 0 is on the GPU"), 0u)
      << kvmill_last_error();
  // A child of fork() has neither threads nor memory of it, and lets go of what it can.
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = kvmill_mapped_check(mapped, 0, 1) == KVMILL_FAILED_PRECONDITION;
    kvmill_mapped_free(mapped);
    const bool ended = kvmill_client_destroy(client_) == KVMILL_OK;
    _exit(refused && ended ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  // The device lives as long as what is on it.
  std::swap(client, client_);
  kvmill_namespace_free(ns);
  EXPECT_EQ(kvmill_client_destroy(client), KVMILL_OK);
  EXPECT_EQ(kvmill_mapped_check(mapped, 0, 1), KVMILL_ABORTED);
  kvmill_mapped_free(mapped);
}

}  // namespace
}  // namespace kvmill::testing
