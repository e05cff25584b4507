// client/kvmill_engine.h, and how a client is told to reach its daemon.
#include <unistd.h>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using Sessions = CApiTest;

TEST_F(Sessions, OptionsOfTheDataPathAreTakenAndChecked) {
  const std::string to = address();
  auto options = Init<kvmill_client_options>();
  options.address = to.c_str();
  options.path = KVMILL_PATH_INLINE;
  options.data_plane_plaintext = 1;
  options.encode_in = KVMILL_ENCODE_CLIENT;
  options.encode_threads = 2;
  kvmill_client* client = nullptr;
  ASSERT_EQ(kvmill_client_create(&options, &client), KVMILL_OK) << kvmill_last_error();
  std::swap(client, client_);
  kvmill_namespace* const ns = Open("encoded-here");
  EXPECT_EQ(BlockOf(Put(ns, "key", SmallBlock(1))).outcome,
            static_cast<std::uint32_t>(KVMILL_BLOCK_STORED));
  char transport[257] = "x";
  EXPECT_EQ(kvmill_client_ucx_transport(client_, transport, sizeof(transport)), KVMILL_OK);
  EXPECT_STREQ(transport, "");
  EXPECT_EQ(kvmill_client_ucx_transport(client_, transport, 0), KVMILL_OUT_OF_RANGE);
  std::swap(client, client_);
  kvmill_namespace_free(ns);
  kvmill_client_destroy(client);

  // UCX is what this daemon does not have.
  options.path = KVMILL_PATH_UCX;
  ASSERT_EQ(kvmill_client_create(&options, &client), KVMILL_OK) << kvmill_last_error();
  std::swap(client, client_);
  kvmill_namespace* const other = Open("over-ucx");
  const SmallBlock block(1);
  const std::vector<kvmill_store_layer> layers = Inputs(block);
  const kvmill_store_block stored = Block("key", layers);
  EXPECT_EQ(
      Finish(kvmill_store(client_, other, &stored, 1, nullptr, nullptr, queue_, 2)).event.code,
      KVMILL_FAILED_PRECONDITION);
  std::swap(client, client_);
  kvmill_namespace_free(other);
  kvmill_client_destroy(client);

  const auto refused = [&](const kvmill_client_options& bad, const char* text) {
    EXPECT_EQ(kvmill_client_create(&bad, &client), KVMILL_INVALID_ARGUMENT);
    EXPECT_EQ(client, nullptr);
    EXPECT_NE(std::string(kvmill_last_error()).find(text), std::string::npos)
        << kvmill_last_error();
  };
  kvmill_client_options bad = options;
  bad.path = 3;
  refused(bad, "path 3, want 0 to 2");
  bad = options;
  bad.encode_in = 3;
  refused(bad, "encode_in 3");
  bad = options;
  bad.encode_threads = 1025;
  refused(bad, "encode_threads 1025, at most 1024");
}

TEST_F(Sessions, EventsComeOutOfTheQueueThatTheClientNamed) {
  kvmill_queue* told = nullptr;
  ASSERT_EQ(kvmill_queue_create(&told), KVMILL_OK);
  const std::string to = address();
  auto options = Init<kvmill_client_options>();
  options.address = to.c_str();
  options.session_queue = told;
  options.session_tag = 77;
  kvmill_client* client = nullptr;
  ASSERT_EQ(kvmill_client_create(&options, &client), KVMILL_OK);
  std::swap(client, client_);
  kvmill_namespace* const ns = Open("events");
  Put(ns, "key", SmallBlock(1));
  kvmill_mapped* const mapped = Map(ns, {"key"}, 100);
  // The leases of the next event.
  const auto next = [&](std::uint32_t what) -> std::uint64_t {
    auto event = Init<kvmill_event>();
    EXPECT_EQ(kvmill_queue_next(told, 60000, &event), KVMILL_OK) << kvmill_last_error();
    if (event.result == nullptr) return 1000;
    EXPECT_EQ(event.tag, 77u);
    EXPECT_EQ(event.operation, static_cast<kvmill_operation>(KVMILL_SESSION_EVENT));
    EXPECT_EQ(event.code, KVMILL_OK);
    auto said = Init<kvmill_session_event>();
    EXPECT_EQ(kvmill_result_session(event.result, &said), KVMILL_OK) << kvmill_last_error();
    EXPECT_EQ(said.what, what);
    std::uint64_t count = 0;
    EXPECT_EQ(kvmill_result_count(event.result, &count), KVMILL_FAILED_PRECONDITION);
    kvmill_result_free(event.result);
    return said.leases;
  };
  EXPECT_EQ(next(KVMILL_SESSION_LEASES_EXPIRED), 1u);
  EXPECT_EQ(kvmill_queue_running(told), 0u);
  kvmill_mapped_free(mapped);

  // Nobody listens: they add up in one event. When all of it has come nobody can know, so it gets
  // more time each time.
  int events = 0;
  for (useconds_t attempt = 1; events != 1 && attempt <= 6; ++attempt) {
    for (int i = 0; i < 3; ++i) {
      kvmill_mapped* const short_lived = Map(ns, {"key"}, 20);
      for (std::uint64_t left = 1; left > 0; usleep(10'000)) {
        const Outcome outcome = Finish(kvmill_stat(client_, nullptr, queue_, 9));
        auto stat = Init<kvmill_stat_result>();
        ASSERT_EQ(kvmill_result_stat(outcome.result.get(), &stat), KVMILL_OK);
        left = stat.leases;
      }
      kvmill_mapped_free(short_lived);
    }
    usleep(attempt * attempt * 200'000);
    events = 0;
    std::uint64_t leases = 0;
    for (; leases < 3; ++events) leases += next(KVMILL_SESSION_LEASES_EXPIRED);
    ASSERT_EQ(leases, 3u);
  }
  EXPECT_EQ(events, 1);
  KillDaemon();
  EXPECT_EQ(next(KVMILL_SESSION_ENDED), 0u);
  StartDaemon();

  // A queue that is gone loses what would have come, and nothing else.
  kvmill_namespace_free(ns);
  kvmill_namespace* const again = Open("events-again");
  Put(again, "key", SmallBlock(1));
  kvmill_mapped* const second = Map(again, {"key"}, 50);
  ASSERT_EQ(kvmill_queue_destroy(told), KVMILL_OK) << kvmill_last_error();
  usleep(100'000);
  EXPECT_EQ(kvmill_mapped_check(second, 0, 1), KVMILL_ABORTED);
  kvmill_mapped_free(second);
  kvmill_namespace_free(again);
  std::swap(client, client_);
  EXPECT_EQ(kvmill_client_destroy(client), KVMILL_OK);
}

TEST_F(Sessions, TheEnginesMemoryIsDescribedAndWhatDoesNotFitIsNamed) {
  kvmill_namespace* const ns = Open("memory");
  const kvmill_engine_region region = {0x10000, 1 << 20};
  const kvmill_engine_place keys[] = {{0, 0, 0}, {1 << 18, 0, 0}};
  const kvmill_engine_place values[] = {{2 << 18, 0, 0}, {3 << 18, 0, 0}};
  auto layers = Init<kvmill_engine_layers>();
  layers.keys = keys;
  layers.values = values;
  layers.layer_count = 2;
  layers.element = KVMILL_ELEMENT_BFLOAT16;
  layers.block_tokens = layers.head_dim = 64;
  layers.head_count = 2;
  layers.page_tokens = 16;
  layers.page_count = 4;
  layers.page_bytes = layers.page_stride_bytes = 16 * 2 * 64 * 2;
  layers.head_stride_bytes = 128;
  layers.token_stride_bytes = 256;
  auto geometry = Init<kvmill_engine_geometry>();
  geometry.regions = &region;
  geometry.region_count = 1;
  geometry.layers = &layers;
  geometry.layers_count = 1;
  std::uint64_t registration = 0;
  const auto start = [&](const kvmill_engine_geometry& g) {
    return kvmill_register_memory(client_, ns, &g, nullptr, queue_, 1);
  };
  const Outcome outcome = Finish(start(geometry));
  ASSERT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
  ASSERT_EQ(kvmill_result_count(outcome.result.get(), &registration), KVMILL_OK);
  for (const kvmill_code want : {KVMILL_OK, KVMILL_NOT_FOUND}) {
    EXPECT_EQ(
        Finish(kvmill_unregister_memory(client_, registration, nullptr, queue_, 1)).event.code,
        want);
  }

  kvmill_engine_geometry bad = geometry;
  bad.assembling_boot_id = "00";
  const Outcome elsewhere = Finish(start(bad));
  EXPECT_EQ(elsewhere.event.code, KVMILL_FAILED_PRECONDITION);
  EXPECT_NE(elsewhere.message().find("assembling_boot_id 00"), std::string::npos);
  layers.head_dim = 128;
  const Outcome other = Finish(start(geometry));
  EXPECT_EQ(other.event.code, KVMILL_FAILED_PRECONDITION);
  EXPECT_NE(other.message().find("head_dim"), std::string::npos) << other.message();
  layers.head_dim = 64;

  const auto refused = [&](const kvmill_engine_geometry& g, const char* text) {
    EXPECT_EQ(start(g), KVMILL_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kvmill_last_error()).find(text), std::string::npos)
        << kvmill_last_error();
  };
  bad = geometry;
  bad.region_count = SIZE_MAX;
  refused(bad, "region_count");
  bad = geometry;
  bad.regions = nullptr;
  refused(bad, "regions is null");
  bad = geometry;
  bad.layers = nullptr;
  refused(bad, "layers is null");
  bad.layers_count = 1025;
  refused(bad, "layers_count 1025, at most 1024");
  layers.element = 3;
  refused(geometry, "layers 0: element 3");
  layers.element = KVMILL_ELEMENT_BFLOAT16;
  layers.layer_count = SIZE_MAX;
  refused(geometry, "layers 0: layer_count");
  layers.layer_count = 2;
  layers.keys = nullptr;
  refused(geometry, "layers 0: keys is null");
  const kvmill_engine_place odd[] = {{0, 0, 0}, {0, 0, 7}};
  layers.keys = odd;
  refused(geometry, "key 1: zero is 7");
  layers.keys = keys;
  layers.struct_bytes -= 8;
  refused(geometry, "layers: struct_bytes");
  layers.struct_bytes += 8;
  bad = geometry;
  bad.struct_bytes = 16;
  refused(bad, "geometry: struct_bytes 16");
  const std::string long_id(100, 'a');
  bad = geometry;
  bad.assembling_boot_id = long_id.c_str();
  refused(bad, "assembling_boot_id is longer");
  kvmill_namespace_free(ns);
}

}  // namespace
}  // namespace kvmill::testing
