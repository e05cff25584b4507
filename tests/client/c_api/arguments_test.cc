// What client/kvmill.h says to arguments that are wrong, and to callers of other versions.
#include <cstdlib>
#include <cstring>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using Arguments = CApiTest;

// Of the first version. Sizes only grow, offsets never change.
static_assert(sizeof(kvmill_event) == 40 && offsetof(kvmill_event, result) == 32);
static_assert(offsetof(kvmill_client_options, path) == 24 &&
              offsetof(kvmill_client_options, address) == 8);
static_assert(offsetof(kvmill_call_options, timeout_ms) == 8);
static_assert(sizeof(kvmill_layer_group) == 40 && offsetof(kvmill_layer_group, kv_heads) == 24);
static_assert(sizeof(kvmill_namespace_spec) == 88 && offsetof(kvmill_namespace_spec, model) == 24);
static_assert(sizeof(kvmill_key) == 16 && sizeof(kvmill_kv) == 48);
static_assert(sizeof(kvmill_mutable_kv) == 48 && offsetof(kvmill_mutable_kv, tokens) == 44);
static_assert(sizeof(kvmill_store_layer) == 120 && sizeof(kvmill_store_block) == 64);
static_assert(sizeof(kvmill_store_options) == 24 && sizeof(kvmill_fetch_output) == 120);
static_assert(sizeof(kvmill_fetch_options) == 24 && sizeof(kvmill_lookup_result) == 48);
static_assert(offsetof(kvmill_store_result, raw_heads) == 72 && sizeof(kvmill_fetch_result) == 24);
static_assert(sizeof(kvmill_block_result) == 40 && sizeof(kvmill_stat_result) == 120);
static_assert(sizeof(kvmill_tier_usage) == 40);
// Of 1.1.
static_assert(offsetof(kvmill_client_options, session_tag) == 48 &&
              offsetof(kvmill_map_options, lease_ms) == 8);
static_assert(sizeof(kvmill_page) == 32 && sizeof(kvmill_mapped_head) == 24);
static_assert(sizeof(kvmill_attention) == 96 && offsetof(kvmill_attention, soft_cap) == 88);
static_assert(sizeof(kvmill_session_event) == 24 &&
              offsetof(kvmill_engine_geometry, assembling_boot_id) == 40);
static_assert(sizeof(kvmill_engine_layers) == 104 && sizeof(kvmill_engine_place) == 16);

// Of 2.1.
static_assert(offsetof(kvmill_client_options, device) == 56 && sizeof(kvmill_map_options) == 24);
static_assert(sizeof(kvmill_engine_geometry) == 64 && sizeof(kvmill_region_source) == 112);
static_assert(offsetof(kvmill_region_source, handle) == 32 && sizeof(kvmill_page_numbers) == 16);
static_assert(sizeof(kvmill_page_block) == 64 && sizeof(kvmill_page_store_options) == 32);
// Of 2.2.
static_assert(offsetof(kvmill_call_options, elsewhere) == 16 && sizeof(kvmill_elsewhere) == 40);
static_assert(offsetof(kvmill_elsewhere, first_block) == 32);
// Of 2.3.
static_assert(offsetof(kvmill_client_options, token) == 96);
static_assert(offsetof(kvmill_client_options, tls_ca) == 64);
// Of 2.4.
static_assert(sizeof(kvmill_call_options) == 48 && offsetof(kvmill_call_options, request_id) == 24);
// Of 2.5.
static_assert(sizeof(kvmill_client_options) == 112 && sizeof(kvmill_store_result) == 88);
static_assert(offsetof(kvmill_client_options, when_away) == 104);

TEST_F(Arguments, VersionsAndNamesAreThere) {
  EXPECT_EQ(kvmill_abi_version(), (std::uint32_t{KVMILL_ABI_MAJOR} << 16) + KVMILL_ABI_MINOR);
  EXPECT_STREQ(kvmill_version(), KVMILL_TEST_VERSION);
  EXPECT_STREQ(kvmill_code_name(KVMILL_NOT_FOUND), "NOT_FOUND");
  EXPECT_STREQ(kvmill_code_name(KVMILL_UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_STREQ(kvmill_code_name(17), "UNKNOWN");
  EXPECT_STREQ(kvmill_code_name(-1), "UNKNOWN");
}

TEST_F(Arguments, NullIsRefusedEverywhere) {
  kvmill_namespace* const ns = Open("nulls");
  const auto options = Init<kvmill_client_options>();
  const std::string name = "key";
  const kvmill_key key = Key(name);
  kvmill_client* client = nullptr;
  auto event = Init<kvmill_event>();
  const kvmill_code codes[] = {
      kvmill_queue_create(nullptr),
      kvmill_queue_next(nullptr, 0, &event),
      kvmill_queue_next(queue_, 0, nullptr),
      kvmill_queue_drain(nullptr, 0),
      kvmill_client_create(nullptr, &client),
      kvmill_client_create(&options, nullptr),
      kvmill_client_create(&options, &client),  // No address.
      kvmill_client_boot_id(nullptr, nullptr, 0),
      kvmill_client_boot_id(client_, nullptr, 65),
      kvmill_open_namespace(client_, nullptr, nullptr, nullptr, queue_, 1),
      kvmill_open_namespace(client_, "n", nullptr, nullptr, queue_, 1),
      kvmill_find_namespace(nullptr, "n", nullptr, queue_, 1),
      kvmill_find_namespace(client_, nullptr, nullptr, queue_, 1),
      kvmill_find_namespace(client_, "n", nullptr, nullptr, 1),
      kvmill_namespace_get_spec(nullptr, nullptr),
      kvmill_namespace_get_spec(ns, nullptr),
      kvmill_tail_key(key, 1, key, nullptr),
      kvmill_tail_key(key, 1, {nullptr, 0}, nullptr),
      kvmill_lookup(client_, ns, &key, 1, nullptr, 1, nullptr, queue_, 1),
      kvmill_lookup(nullptr, ns, &key, 1, nullptr, 0, nullptr, queue_, 1),
      kvmill_lookup(client_, nullptr, &key, 1, nullptr, 0, nullptr, queue_, 1),
      kvmill_lookup(client_, ns, nullptr, 1, nullptr, 0, nullptr, queue_, 1),
      kvmill_lookup(client_, ns, &key, 1, nullptr, 0, nullptr, nullptr, 1),
      kvmill_store(client_, ns, nullptr, 1, nullptr, nullptr, queue_, 1),
      kvmill_store(client_, nullptr, nullptr, 0, nullptr, nullptr, queue_, 1),
      kvmill_fetch(client_, ns, &key, 1, nullptr, 2, nullptr, nullptr, queue_, 1),
      kvmill_fetch(client_, ns, nullptr, 1, nullptr, 0, nullptr, nullptr, queue_, 1),
      kvmill_remove(client_, ns, nullptr, 1, nullptr, queue_, 1),
      kvmill_clear(client_, nullptr, nullptr, queue_, 1),
      kvmill_flush(nullptr, nullptr, queue_, 1),
      kvmill_flush(client_, nullptr, nullptr, 1),
      kvmill_stat(nullptr, nullptr, queue_, 1),
      kvmill_result_namespace(nullptr, nullptr),
      kvmill_result_count(nullptr, nullptr),
      kvmill_result_lookup(nullptr, nullptr),
      kvmill_result_store(nullptr, nullptr),
      kvmill_result_fetch(nullptr, nullptr),
      kvmill_result_block(nullptr, 0, nullptr),
      kvmill_result_page_bytes(nullptr, 0, 0, nullptr),
      kvmill_result_stat(nullptr, nullptr),
      kvmill_result_tier(nullptr, 0, nullptr),
      kvmill_client_ucx_transport(nullptr, nullptr, 0),
      kvmill_client_ucx_transport(client_, nullptr, 65),
      kvmill_touch(client_, nullptr, &key, 1, nullptr, queue_, 1),
      kvmill_touch(client_, ns, nullptr, 1, nullptr, queue_, 1),
      kvmill_map(nullptr, ns, &key, 1, nullptr, nullptr, queue_, 1),
      kvmill_map(client_, nullptr, &key, 1, nullptr, nullptr, queue_, 1),
      kvmill_map(client_, ns, nullptr, 1, nullptr, nullptr, queue_, 1),
      kvmill_map(client_, ns, &key, 1, nullptr, nullptr, nullptr, 1),
      kvmill_renew(client_, nullptr, 0, nullptr, queue_, 1),
      kvmill_result_mapped(nullptr, nullptr),
      kvmill_result_session(nullptr, nullptr),
      kvmill_mapped_block(nullptr, 0, nullptr),
      kvmill_mapped_check(nullptr, 0, 0),
      kvmill_mapped_verify(nullptr),
      kvmill_mapped_page(nullptr, 0, 0, nullptr),
      kvmill_mapped_heads(nullptr, 0, 0, 0, nullptr, 0),
      kvmill_attend(nullptr, 0, nullptr),
      kvmill_register_memory(client_, nullptr, nullptr, nullptr, queue_, 1),
      kvmill_register_memory(client_, ns, nullptr, nullptr, queue_, 1),
      kvmill_unregister_memory(nullptr, 1, nullptr, queue_, 1),
  };
  int index = 0;
  for (const kvmill_code code : codes) EXPECT_EQ(code, KVMILL_INVALID_ARGUMENT) << index++;
  EXPECT_NE(std::string(kvmill_last_error()).find("null"), std::string::npos);
  EXPECT_EQ(kvmill_queue_running(queue_), 0u) << "nothing was started";
  EXPECT_EQ(kvmill_queue_fd(nullptr), -1);
  EXPECT_EQ(kvmill_queue_running(nullptr), 0u);
  EXPECT_EQ(kvmill_namespace_name(nullptr), nullptr);
  EXPECT_EQ(kvmill_namespace_fingerprint(nullptr), nullptr);
  EXPECT_EQ(kvmill_namespace_layer_count(nullptr), 0u);
  EXPECT_EQ(kvmill_namespace_record_bytes(nullptr, 0), 0u);
  EXPECT_EQ(kvmill_namespace_page_bytes_max(nullptr, 0), 0u);
  EXPECT_STREQ(kvmill_result_message(nullptr), "");
  kvmill_result_free(nullptr);
  kvmill_namespace_free(nullptr);
  EXPECT_EQ(kvmill_mapped_block_count(nullptr), 0u);
  EXPECT_EQ(kvmill_mapped_left_ms(nullptr), 0u);
  EXPECT_EQ(kvmill_mapped_release(nullptr), KVMILL_OK);
  kvmill_mapped_free(nullptr);
  EXPECT_EQ(kvmill_client_destroy(nullptr), KVMILL_OK);
  EXPECT_EQ(kvmill_queue_destroy(nullptr), KVMILL_OK);
  kvmill_namespace_free(ns);
}

// A caller of an older version: its struct ends earlier, and what lies behind is not its own.
TEST_F(Arguments, AnOlderCallersStructsAreEnough) {
  const std::string to = address();
  auto options = Init<kvmill_client_options>();
  options.address = to.c_str();
  options.struct_bytes = offsetof(kvmill_client_options, timeout_ms);
  options.timeout_ms = UINT64_MAX;  // Behind the end: refused if it were read.
  options.path = 99;                // So is this.
  kvmill_client* client = nullptr;
  ASSERT_EQ(kvmill_client_create(&options, &client), KVMILL_OK) << kvmill_last_error();
  kvmill_client_destroy(client);

  const Outcome stat = Finish(kvmill_stat(client_, nullptr, queue_, 1));
  kvmill_stat_result state;
  std::memset(&state, 0x5a, sizeof(state));
  state.struct_bytes = offsetof(kvmill_stat_result, raw_bytes_ingested);
  ASSERT_EQ(kvmill_result_stat(stat.result.get(), &state), KVMILL_OK) << kvmill_last_error();
  EXPECT_NE(state.blocks, 0x5a5a5a5a5a5a5a5au);
  EXPECT_EQ(state.raw_bytes_ingested, 0x5a5a5a5a5a5a5a5au) << "written behind the end";

  kvmill_namespace* const ns = Open("older");
  const SmallBlock block(1);
  const std::vector<kvmill_store_layer> whole = Inputs(block);
  // Elements without the fields of records: the distance between them is their own size.
  constexpr std::size_t kOld = offsetof(kvmill_store_layer, records);
  std::vector<std::byte> old(2 * kOld);
  for (std::size_t l = 0; l < 2; ++l) {
    std::memcpy(&old[l * kOld], &whole[l], kOld);
    std::memcpy(&old[l * kOld], &kOld, sizeof(kOld));
  }
  kvmill_store_block stored = Block("key", whole);
  stored.layers = reinterpret_cast<const kvmill_store_layer*>(old.data());
  stored.struct_bytes = offsetof(kvmill_store_block, block_index);
  stored.block_index = 77;
  const Outcome put = Finish(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 2));
  EXPECT_EQ(BlockOf(put).outcome, static_cast<uint32_t>(KVMILL_BLOCK_STORED));
  kvmill_namespace_free(ns);
}

// A caller of a newer version: what this library does not know must be zero.
TEST_F(Arguments, ANewerCallersStructsAreTakenWhenTheyAskForNothingNew) {
  struct Newer {
    kvmill_call_options options;
    std::uint64_t more;
  };
  Newer call = {};
  call.options.struct_bytes = sizeof(call);
  EXPECT_EQ(Finish(kvmill_stat(client_, &call.options, queue_, 1)).event.code, KVMILL_OK);
  call.more = 1;
  EXPECT_EQ(kvmill_stat(client_, &call.options, queue_, 2), KVMILL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvmill_last_error()).find("does not know"), std::string::npos);

  struct NewerEvent {
    kvmill_event event;
    std::uint64_t more;
  };
  NewerEvent event;
  std::memset(&event, 0x5a, sizeof(event));
  event.event.struct_bytes = sizeof(event);
  ASSERT_EQ(kvmill_stat(client_, nullptr, queue_, 3), KVMILL_OK);
  ASSERT_EQ(kvmill_queue_next(queue_, 60000, &event.event), KVMILL_OK);
  EXPECT_EQ(event.event.tag, 3u);
  EXPECT_EQ(event.event.struct_bytes, sizeof(event));
  EXPECT_EQ(event.more, 0u) << "what an older library does not fill in is zero";
  kvmill_result_free(event.event.result);
}

TEST_F(Arguments, WrongSizesAreRefused) {
  auto options = Init<kvmill_client_options>();
  options.address = "unix:/nowhere";
  kvmill_client* client = nullptr;
  for (const std::size_t bytes :
       {std::size_t{0}, sizeof(std::size_t), std::size_t{4097}, SIZE_MAX}) {
    options.struct_bytes = bytes;
    EXPECT_EQ(kvmill_client_create(&options, &client), KVMILL_INVALID_ARGUMENT) << bytes;
    EXPECT_EQ(client, nullptr);
  }
  EXPECT_NE(std::string(kvmill_last_error()).find("struct_bytes"), std::string::npos);

  ASSERT_EQ(kvmill_stat(client_, nullptr, queue_, 1), KVMILL_OK);
  ASSERT_EQ(kvmill_queue_drain(queue_, -1), KVMILL_OK);
  auto event = Init<kvmill_event>();
  event.struct_bytes = offsetof(kvmill_event, result);
  EXPECT_EQ(kvmill_queue_next(queue_, 0, &event), KVMILL_INVALID_ARGUMENT);
  event.struct_bytes = sizeof(event);
  EXPECT_EQ(kvmill_queue_next(queue_, 0, &event), KVMILL_OK) << "the event was not lost";
  auto state = Init<kvmill_stat_result>();
  state.struct_bytes = 0;
  EXPECT_EQ(kvmill_result_stat(event.result, &state), KVMILL_INVALID_ARGUMENT);
  kvmill_result_free(event.result);

  kvmill_namespace* const ns = Open("sizes");
  const SmallBlock block(1);
  std::vector<kvmill_store_layer> layers = Inputs(block);
  layers[1].struct_bytes -= 8;
  const kvmill_store_block stored = Block("key", layers);
  EXPECT_EQ(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 2),
            KVMILL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvmill_last_error()).find("that of the first"), std::string::npos);
  EXPECT_EQ(kvmill_queue_running(queue_), 0u);
  kvmill_namespace_free(ns);
}

TEST_F(Arguments, ValuesOutOfRangeAreNamed) {
  kvmill_namespace* const ns = Open("ranges");
  const auto says = [&](kvmill_code code, const char* text) {
    EXPECT_TRUE(code == KVMILL_INVALID_ARGUMENT || code == KVMILL_OUT_OF_RANGE) << code;
    EXPECT_NE(std::string(kvmill_last_error()).find(text), std::string::npos)
        << kvmill_last_error() << ", want " << text;
  };
  const std::string name = "x", long_name(65, 'k'), empty;
  const kvmill_key keys[] = {Key(name), Key(long_name)};
  says(kvmill_lookup(client_, ns, keys, 2, nullptr, 0, nullptr, queue_, 1), "key 1");
  const kvmill_key no_bytes = Key(empty), no_data = {nullptr, 4};
  says(kvmill_lookup(client_, ns, &no_bytes, 1, nullptr, 0, nullptr, queue_, 1), "empty");
  says(kvmill_lookup(client_, ns, &no_data, 1, nullptr, 0, nullptr, queue_, 1), "null");
  says(kvmill_remove(client_, ns, keys, SIZE_MAX, nullptr, queue_, 1), "at most");
  auto call = Init<kvmill_call_options>();
  call.timeout_ms = UINT64_MAX;
  says(kvmill_flush(client_, &call, queue_, 1), "timeout_ms");
  call.timeout_ms = 0;
  auto elsewhere = Init<kvmill_elsewhere>();
  call.elsewhere = &elsewhere;
  elsewhere.hint = long_name.c_str();
  says(kvmill_lookup(client_, ns, keys, 1, nullptr, 0, &call, queue_, 1), "hint of 65 bytes");
  elsewhere.hint = nullptr;
  elsewhere.anchor = no_data;
  says(kvmill_lookup(client_, ns, keys, 1, nullptr, 0, &call, queue_, 1), "anchor.data");
  elsewhere.anchor = {};
  elsewhere.struct_bytes = 4;
  says(kvmill_lookup(client_, ns, keys, 1, nullptr, 0, &call, queue_, 1), "elsewhere");

  const SmallBlock block(1);
  std::vector<kvmill_store_layer> layers = Inputs(block);
  kvmill_store_block stored = Block("key", layers);
  stored.layer_count = 1;
  says(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 1), "1 layers");
  stored.layer_count = 2;
  layers[1].v.tokens = 63;
  says(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 1), "layer 1: 63 tokens");
  layers[1].records = block.values[0].data();
  layers[1].records_bytes = 100;
  says(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 1), "records of 100");
  layers[1] = Init<kvmill_store_layer>();
  EXPECT_EQ(Finish(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 1)).event.code,
            KVMILL_INVALID_ARGUMENT)
      << "a layer without memory";

  SmallBlock out;
  std::vector<kvmill_fetch_output> outputs = Outputs(&out);
  const auto fetch = [&](const kvmill_fetch_options& options, std::size_t count = 2) {
    return kvmill_fetch(client_, ns, keys, 1, outputs.data(), count, &options, nullptr, queue_, 1);
  };
  auto options = Init<kvmill_fetch_options>();
  says(fetch(options, 1), "1 outputs");
  options.form = 3;
  says(fetch(options), "form 3");
  options.form = KVMILL_FORM_VALUES16;
  options.frame = 2;
  says(fetch(options), "frame 2");
  options.frame = 0;
  options.head_begin = 1;
  says(fetch(options), "heads 1");
  options.head_count = 2;
  says(fetch(options), "heads 1 to 3");
  options.head_begin = options.head_count = UINT32_MAX;
  says(fetch(options), "heads");
  options.head_begin = 0;
  options.head_count = 1;
  options.form = KVMILL_FORM_PAGES;
  says(fetch(options), "all heads");
  options.head_count = 0;
  says(fetch(options), "no memory");
  options.form = KVMILL_FORM_RECORDS;
  for (kvmill_fetch_output& output : outputs) output.data = out.values[0].data();
  outputs[0].data_bytes = outputs[1].data_bytes = 2 * kvmill_namespace_record_bytes(ns, 0);
  outputs[1].data_bytes -= 1;
  EXPECT_EQ(fetch(options), KVMILL_OUT_OF_RANGE);
  options.form = KVMILL_FORM_VALUES16;
  outputs[0].v.data = nullptr;
  says(fetch(options), "output 0");

  auto group = Init<kvmill_layer_group>();
  auto spec = Init<kvmill_namespace_spec>();
  const auto open = [&] {
    return kvmill_open_namespace(client_, "bad", &spec, nullptr, queue_, 1);
  };
  spec.source_dtype = 2;
  says(open(), "source_dtype 2");
  spec.source_dtype = 0;
  spec.key_bits = 260;  // Would be 4 in 8 bits.
  says(open(), "key_bits 260");
  spec.key_bits = 0;
  spec.group_count = 1;
  says(open(), "groups is null");
  spec.groups = &group;
  group.layer_count = 1;
  says(open(), "layers is null");
  group.layer_count = SIZE_MAX;
  says(open(), "at most");
  group.layer_count = 0;
  group.kv_heads = 65537;
  says(open(), "kv_heads 65537");
  group.kv_heads = 1;
  group.attention = 9;
  says(open(), "attention 9");
  group.attention = 0;
  const std::string long_text(2000, 'm');
  spec.model = long_text.c_str();
  says(open(), "model");
  spec.model = nullptr;
  EXPECT_EQ(Finish(open()).event.code, KVMILL_INVALID_ARGUMENT) << "the daemon refuses the rest";
  EXPECT_EQ(kvmill_queue_running(queue_), 0u);
  kvmill_namespace_free(ns);
}

TEST_F(Arguments, AResultTellsOnlyWhatItHas) {
  const Outcome stat = Finish(kvmill_stat(client_, nullptr, queue_, 1));
  const Outcome failed = Finish(kvmill_find_namespace(client_, "none", nullptr, queue_, 2));
  for (kvmill_result* result : {stat.result.get(), failed.result.get()}) {
    kvmill_namespace* ns = nullptr;
    std::uint64_t count = 0;
    std::size_t bytes = 0;
    auto lookup = Init<kvmill_lookup_result>();
    auto store = Init<kvmill_store_result>();
    auto fetch = Init<kvmill_fetch_result>();
    auto block = Init<kvmill_block_result>();
    EXPECT_EQ(kvmill_result_namespace(result, &ns), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(ns, nullptr);
    EXPECT_EQ(kvmill_result_count(result, &count), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(kvmill_result_lookup(result, &lookup), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(kvmill_result_store(result, &store), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(kvmill_result_fetch(result, &fetch), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(kvmill_result_block(result, 0, &block), KVMILL_FAILED_PRECONDITION);
    EXPECT_EQ(kvmill_result_page_bytes(result, 0, 0, &bytes), KVMILL_FAILED_PRECONDITION);
  }
  auto state = Init<kvmill_stat_result>();
  EXPECT_EQ(kvmill_result_stat(failed.result.get(), &state), KVMILL_FAILED_PRECONDITION);
  EXPECT_NE(std::string(kvmill_last_error()).find("none"), std::string::npos)
      << "why the operation failed: " << kvmill_last_error();
}

}  // namespace
}  // namespace kvmill::testing
