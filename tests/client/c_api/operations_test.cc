// Every operation of client/kvmill.h against a real daemon.
#include <algorithm>
#include <cstring>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using Operations = CApiTest;

TEST_F(Operations, ANamespaceKeepsItsSpec) {
  const std::uint16_t full[] = {0, 2}, window[] = {1};
  kvmill_layer_group groups[2] = {Init<kvmill_layer_group>(), Init<kvmill_layer_group>()};
  groups[0].layers = full;
  groups[0].layer_count = 2;
  groups[0].kv_heads = 4;
  groups[0].head_dim = 128;
  groups[1].layers = window;
  groups[1].layer_count = 1;
  groups[1].kv_heads = 2;
  groups[1].head_dim = 64;
  groups[1].attention = KVMILL_ATTENTION_WINDOW;
  groups[1].window_tokens = 1024;
  auto spec = Init<kvmill_namespace_spec>();
  spec.groups = groups;
  spec.group_count = 2;
  spec.model = "m";
  spec.revision = "r";
  spec.adapter_digest = "a";
  spec.salt = "s";
  spec.hash_scheme = "h";
  spec.source_dtype = KVMILL_BFLOAT16;
  spec.block_tokens = 64;
  spec.key_bits = 2;
  spec.value_bits = 4;
  spec.frame = KVMILL_FRAME_ROTATED;
  spec.sink_blocks = 3;
  Outcome opened = Finish(kvmill_open_namespace(client_, "n", &spec, nullptr, queue_, 7));
  ASSERT_EQ(opened.event.code, KVMILL_OK) << opened.message();
  EXPECT_EQ(opened.event.tag, 7u);
  EXPECT_EQ(opened.event.operation, KVMILL_OPEN_NAMESPACE);
  const Outcome found = Finish(kvmill_find_namespace(client_, "n", nullptr, queue_, 8));
  kvmill_namespace* ns = nullptr;
  ASSERT_EQ(kvmill_result_namespace(found.result.get(), &ns), KVMILL_OK) << kvmill_last_error();
  opened.result.reset();  // The handle does not need it.

  EXPECT_STREQ(kvmill_namespace_name(ns), "n");
  EXPECT_EQ(std::string(kvmill_namespace_fingerprint(ns)).size(), 32u);
  EXPECT_EQ(kvmill_namespace_layer_count(ns), 3u);
  EXPECT_GT(kvmill_namespace_record_bytes(ns, 0), kvmill_namespace_record_bytes(ns, 2));
  EXPECT_GT(kvmill_namespace_page_bytes_max(ns, 0), 4 * kvmill_namespace_record_bytes(ns, 0));
  EXPECT_EQ(kvmill_namespace_record_bytes(ns, 3), 0u);
  auto got = Init<kvmill_namespace_spec>();
  ASSERT_EQ(kvmill_namespace_get_spec(ns, &got), KVMILL_OK);
  EXPECT_STREQ(got.model, "m");
  EXPECT_STREQ(got.revision, "r");
  EXPECT_STREQ(got.adapter_digest, "a");
  EXPECT_STREQ(got.salt, "s");
  EXPECT_STREQ(got.hash_scheme, "h");
  EXPECT_EQ(got.source_dtype, static_cast<uint32_t>(KVMILL_BFLOAT16));
  EXPECT_EQ(got.block_tokens, 64u);
  EXPECT_EQ(got.key_bits, 2u);
  EXPECT_EQ(got.value_bits, 4u);
  EXPECT_EQ(got.frame, static_cast<uint32_t>(KVMILL_FRAME_ROTATED));
  EXPECT_EQ(got.sink_blocks, 3u);
  ASSERT_EQ(got.group_count, 2u);
  EXPECT_EQ(got.groups[0].layers[1], 2);
  EXPECT_EQ(got.groups[0].kv_heads, 4u);
  EXPECT_EQ(got.groups[0].head_dim, 128u);
  EXPECT_EQ(got.groups[1].attention, static_cast<uint32_t>(KVMILL_ATTENTION_WINDOW));
  EXPECT_EQ(got.groups[1].window_tokens, 1024u);

  const Outcome same =
      Finish(kvmill_open_namespace_or_fallback(client_, "n", &spec, nullptr, queue_, 9));
  EXPECT_EQ(same.event.operation, KVMILL_OPEN_NAMESPACE);
  kvmill_namespace* again = nullptr;
  ASSERT_EQ(kvmill_result_namespace(same.result.get(), &again), KVMILL_OK) << kvmill_last_error();
  EXPECT_STREQ(kvmill_namespace_fingerprint(again), kvmill_namespace_fingerprint(ns))
      << "nothing was measured";
  kvmill_namespace_free(again);
  kvmill_namespace_free(ns);

  EXPECT_EQ(Finish(kvmill_find_namespace(client_, "none", nullptr, queue_, 9)).event.code,
            KVMILL_NOT_FOUND);
  spec.salt = "other";
  const Outcome other = Finish(kvmill_open_namespace(client_, "n", &spec, nullptr, queue_, 9));
  EXPECT_EQ(other.event.code, KVMILL_FAILED_PRECONDITION);
  EXPECT_NE(other.message().find("salt"), std::string::npos) << other.message();
}

TEST_F(Operations, WhatIsStoredIsFoundFetchedAndRemoved) {
  kvmill_namespace* const ns = Open("blocks");
  const Outcome stat_before = Finish(kvmill_stat(client_, nullptr, queue_, 1));
  auto before = Init<kvmill_stat_result>();
  ASSERT_EQ(kvmill_result_stat(stat_before.result.get(), &before), KVMILL_OK);
  const SmallBlock block(1);
  const Outcome put = Put(ns, "key", block);
  EXPECT_EQ(BlockOf(put).outcome, static_cast<uint32_t>(KVMILL_BLOCK_STORED));
  auto stored = Init<kvmill_store_result>();
  ASSERT_EQ(kvmill_result_store(put.result.get(), &stored), KVMILL_OK);
  EXPECT_EQ(stored.blocks_stored, 1u);
  EXPECT_EQ(stored.raw_bytes, 2u * 2 * 2 * 64 * 64 * 2);
  EXPECT_EQ(BlockOf(Put(ns, "key", block)).outcome, static_cast<uint32_t>(KVMILL_BLOCK_EXISTING));

  const std::string names[] = {"key", "missing"};
  const kvmill_key keys[] = {Key(names[0]), Key(names[1])};
  const Outcome looked =
      Finish(kvmill_lookup(client_, ns, keys, 2, nullptr, 0, nullptr, queue_, 3));
  auto found = Init<kvmill_lookup_result>();
  ASSERT_EQ(kvmill_result_lookup(looked.result.get(), &found), KVMILL_OK) << kvmill_last_error();
  EXPECT_EQ(found.hit_blocks, 1u);
  EXPECT_EQ(found.hit_tokens, 64u);
  EXPECT_EQ(found.tiers[0], KVMILL_TIER_HOST);
  EXPECT_EQ(found.tail_tokens, 0u);

  SmallBlock got, none;
  std::vector<kvmill_fetch_output> outputs = Outputs(&got);
  for (const kvmill_fetch_output& output : Outputs(&none)) outputs.push_back(output);
  const Outcome fetched =
      Finish(kvmill_fetch(client_, ns, keys, 2, outputs.data(), 4, nullptr, nullptr, queue_, 4));
  ASSERT_EQ(fetched.event.code, KVMILL_OK) << fetched.message();
  EXPECT_EQ(BlockOf(fetched, 0).code, KVMILL_OK) << BlockOf(fetched, 0).message;
  EXPECT_EQ(BlockOf(fetched, 0).token_count, 64u);
  EXPECT_EQ(BlockOf(fetched, 1).code, KVMILL_NOT_FOUND);
  EXPECT_LT(block.RelativeError(got), 0.35);  // 2-bit values lose about a third.
  EXPECT_GT(block.RelativeError(got), 0.05);

  const Outcome removed = Finish(kvmill_remove(client_, ns, keys, 2, nullptr, queue_, 5));
  uint64_t count = 0;
  ASSERT_EQ(kvmill_result_count(removed.result.get(), &count), KVMILL_OK);
  EXPECT_EQ(count, 1u);
  Put(ns, "again", block);
  const Outcome cleared = Finish(kvmill_clear(client_, ns, nullptr, queue_, 6));
  ASSERT_EQ(kvmill_result_count(cleared.result.get(), &count), KVMILL_OK);
  EXPECT_EQ(count, 1u);
  const Outcome flushed = Finish(kvmill_flush(client_, nullptr, queue_, 7));
  EXPECT_EQ(flushed.event.operation, KVMILL_FLUSH);
  EXPECT_EQ(kvmill_result_count(flushed.result.get(), &count), KVMILL_OK) << flushed.message();

  const Outcome stat = Finish(kvmill_stat(client_, nullptr, queue_, 8));
  auto state = Init<kvmill_stat_result>();
  ASSERT_EQ(kvmill_result_stat(stat.result.get(), &state), KVMILL_OK);
  EXPECT_EQ(state.blocks, before.blocks) << "all were removed";
  EXPECT_EQ(state.raw_bytes_ingested, before.raw_bytes_ingested + 2 * stored.raw_bytes);
  ASSERT_GE(state.tier_count, 1u);
  auto usage = Init<kvmill_tier_usage>();
  ASSERT_EQ(kvmill_result_tier(stat.result.get(), 0, &usage), KVMILL_OK);
  EXPECT_EQ(usage.tier, static_cast<uint32_t>(KVMILL_TIER_HOST));
  EXPECT_GT(usage.capacity_bytes, 0u);
  EXPECT_EQ(kvmill_result_tier(stat.result.get(), state.tier_count, &usage), KVMILL_OUT_OF_RANGE);
  char boot_id[65];
  ASSERT_EQ(kvmill_client_boot_id(client_, boot_id, sizeof(boot_id)), KVMILL_OK);
  EXPECT_STREQ(boot_id, state.boot_id);
  EXPECT_NE(std::string(boot_id), "");
  EXPECT_EQ(kvmill_client_boot_id(client_, boot_id, 4), KVMILL_OUT_OF_RANGE);
  kvmill_namespace_free(ns);
}

// The engine's pages: 16 tokens each, of both heads, in another order than the tokens.
TEST_F(Operations, PageTablesStridesAndHeadRangesLeadToTheSameBytes) {
  kvmill_namespace* const ns = Open("pages");
  const SmallBlock block(2);
  constexpr std::size_t kRow = 2 * 64, kPage = 16 * kRow;  // Values.
  const int order[] = {2, 0, 3, 1};
  // One cache for a layer and K or V, with a page that nobody uses in front.
  std::vector<std::vector<std::uint16_t>> caches(4, std::vector<std::uint16_t>(5 * kPage));
  std::vector<std::vector<const void*>> tables(4);
  std::vector<std::vector<void*>> out_tables(4);
  std::vector<std::vector<std::uint16_t>> outs = caches;
  for (std::size_t v = 0; v < 4; ++v) {
    for (std::size_t page = 0; page < 4; ++page) {
      std::uint16_t* const at = &caches[v][(1 + static_cast<std::size_t>(order[page])) * kPage];
      std::copy_n(&block.values[v][page * kPage], kPage, at);
      tables[v].push_back(at - kPage);
      out_tables[v].push_back(&outs[v][static_cast<std::size_t>(order[page]) * kPage]);
    }
  }
  std::vector<kvmill_store_layer> layers = Inputs(block);
  std::vector<kvmill_fetch_output> outputs(2, Init<kvmill_fetch_output>());
  for (std::size_t v = 0; v < 4; ++v) {
    kvmill_kv& kv = v % 2 == 0 ? layers[v / 2].k : layers[v / 2].v;
    kv.data = nullptr;
    kv.pages = tables[v].data();
    kv.page_tokens = 16;
    kv.offset_bytes = 2 * kPage;
    kvmill_mutable_kv& out = v % 2 == 0 ? outputs[v / 2].k : outputs[v / 2].v;
    out.pages = out_tables[v].data();
    out.page_tokens = 16;
    out.offset_bytes = 2 * kPage;
    out.token_stride_bytes = 2 * kRow;
    out.head_stride_bytes = 2 * 64;
  }
  // Two ranks store a head each: the second by its own strides.
  auto options = Init<kvmill_store_options>();
  options.head_count = 1;
  const kvmill_store_block first = Block("key", layers);
  Outcome half = Finish(kvmill_store(client_, ns, &first, 1, &options, nullptr, queue_, 1));
  EXPECT_EQ(BlockOf(half).outcome, static_cast<uint32_t>(KVMILL_BLOCK_PARTIAL));
  options.head_begin = 1;
  for (kvmill_store_layer& layer : layers)
    layer.k.offset_bytes = layer.v.offset_bytes = 2 * kPage + 128;
  const kvmill_store_block second = Block("key", layers);
  half = Finish(kvmill_store(client_, ns, &second, 1, &options, nullptr, queue_, 2));
  EXPECT_EQ(BlockOf(half).outcome, static_cast<uint32_t>(KVMILL_BLOCK_STORED))
      << BlockOf(half).message;

  const std::string name = "key";
  const kvmill_key key = Key(name);
  SmallBlock whole;
  const std::vector<kvmill_fetch_output> plain = Outputs(&whole);
  Outcome fetched =
      Finish(kvmill_fetch(client_, ns, &key, 1, plain.data(), 2, nullptr, nullptr, queue_, 3));
  ASSERT_EQ(BlockOf(fetched).code, KVMILL_OK) << BlockOf(fetched).message;
  EXPECT_LT(block.RelativeError(whole), 0.35);
  fetched =
      Finish(kvmill_fetch(client_, ns, &key, 1, outputs.data(), 2, nullptr, nullptr, queue_, 4));
  ASSERT_EQ(BlockOf(fetched).code, KVMILL_OK) << BlockOf(fetched).message;
  for (std::size_t v = 0; v < 4; ++v) {
    for (std::size_t page = 0; page < 4; ++page) {
      const auto* const at = static_cast<const std::uint16_t*>(out_tables[v][page]) + kPage;
      EXPECT_TRUE(std::equal(at, at + kPage, &whole.values[v][page * kPage])) << v << " " << page;
    }
  }
  // The second head alone.
  std::vector<std::vector<std::uint16_t>> one(4, std::vector<std::uint16_t>(64 * 64));
  std::vector<kvmill_fetch_output> narrow = plain;
  for (std::size_t v = 0; v < 4; ++v) {
    kvmill_mutable_kv& out = v % 2 == 0 ? narrow[v / 2].k : narrow[v / 2].v;
    out.data = one[v].data();
    out.token_stride_bytes = 2 * 64;
  }
  auto fetch_options = Init<kvmill_fetch_options>();
  fetch_options.head_begin = fetch_options.head_count = 1;
  fetched = Finish(
      kvmill_fetch(client_, ns, &key, 1, narrow.data(), 2, &fetch_options, nullptr, queue_, 5));
  ASSERT_EQ(BlockOf(fetched).code, KVMILL_OK) << BlockOf(fetched).message;
  for (std::size_t v = 0; v < 4; ++v) {
    for (std::size_t t = 0; t < 64; ++t) {
      EXPECT_TRUE(
          std::equal(&one[v][t * 64], &one[v][t * 64] + 64, &whole.values[v][t * kRow + 64]));
    }
  }
  kvmill_namespace_free(ns);
}

TEST_F(Operations, RecordsAndPagesComeAsTheyAreAndRecordsCanBeStoredAgain) {
  kvmill_namespace* const ns = Open("records");
  const SmallBlock block(3);
  Put(ns, "key", block);
  const std::string name = "key", copy_name = "copy";
  const kvmill_key key = Key(name), copy_key = Key(copy_name);
  const std::size_t record_bytes = kvmill_namespace_record_bytes(ns, 0);
  std::vector<std::vector<std::uint8_t>> records(2, std::vector<std::uint8_t>(2 * record_bytes));
  std::vector<kvmill_fetch_output> outputs(2, Init<kvmill_fetch_output>());
  for (std::size_t l = 0; l < 2; ++l) {
    outputs[l].data = records[l].data();
    outputs[l].data_bytes = records[l].size();
  }
  auto options = Init<kvmill_fetch_options>();
  options.form = KVMILL_FORM_RECORDS;
  Outcome fetched =
      Finish(kvmill_fetch(client_, ns, &key, 1, outputs.data(), 2, &options, nullptr, queue_, 1));
  ASSERT_EQ(BlockOf(fetched).code, KVMILL_OK) << BlockOf(fetched).message;

  std::vector<kvmill_store_layer> layers(2, Init<kvmill_store_layer>());
  for (std::size_t l = 0; l < 2; ++l) {
    layers[l].records = records[l].data();
    layers[l].records_bytes = records[l].size();
  }
  const kvmill_store_block stored = Block(copy_name.c_str(), layers);
  const Outcome put = Finish(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 2));
  ASSERT_EQ(BlockOf(put).code, KVMILL_OK) << BlockOf(put).message;
  SmallBlock a, b;
  std::vector<kvmill_fetch_output> decoded = Outputs(&a);
  for (const kvmill_fetch_output& output : Outputs(&b)) decoded.push_back(output);
  const kvmill_key both[] = {key, copy_key};
  fetched =
      Finish(kvmill_fetch(client_, ns, both, 2, decoded.data(), 4, nullptr, nullptr, queue_, 3));
  ASSERT_EQ(BlockOf(fetched, 1).code, KVMILL_OK) << BlockOf(fetched, 1).message;
  EXPECT_EQ(a.values, b.values);
  EXPECT_LT(block.RelativeError(a), 0.35);

  options.form = KVMILL_FORM_PAGES;
  std::vector<std::vector<std::uint8_t>> pages(
      2, std::vector<std::uint8_t>(kvmill_namespace_page_bytes_max(ns, 0)));
  for (std::size_t l = 0; l < 2; ++l) {
    outputs[l].data = pages[l].data();
    outputs[l].data_bytes = l == 0 ? pages[l].size() : 2 * record_bytes;
  }
  fetched =
      Finish(kvmill_fetch(client_, ns, &key, 1, outputs.data(), 2, &options, nullptr, queue_, 4));
  EXPECT_EQ(BlockOf(fetched).code, KVMILL_OUT_OF_RANGE) << "the second page has a header, too";
  outputs[1].data_bytes = pages[1].size();
  fetched =
      Finish(kvmill_fetch(client_, ns, &key, 1, outputs.data(), 2, &options, nullptr, queue_, 5));
  ASSERT_EQ(BlockOf(fetched).code, KVMILL_OK) << BlockOf(fetched).message;
  std::size_t page_bytes = 0;
  ASSERT_EQ(kvmill_result_page_bytes(fetched.result.get(), 0, 1, &page_bytes), KVMILL_OK);
  EXPECT_GT(page_bytes, 2 * record_bytes);
  EXPECT_EQ(std::string(pages[1].begin(), pages[1].begin() + 4), "KMPG");
  const auto end = pages[1].begin() + static_cast<std::ptrdiff_t>(page_bytes);
  EXPECT_NE(std::search(pages[1].begin(), end, records[1].begin(),
                        records[1].begin() + static_cast<std::ptrdiff_t>(record_bytes)),
            end);
  EXPECT_EQ(kvmill_result_page_bytes(fetched.result.get(), 0, 2, &page_bytes), KVMILL_OUT_OF_RANGE);
  kvmill_namespace_free(ns);
}

TEST_F(Operations, ATailStaysInSixteenBitsAndNeedsItsRoom) {
  kvmill_namespace* const ns = Open("tails");
  const SmallBlock block(4);
  const std::vector<kvmill_store_layer> layers = Inputs(block);
  // Another continuation is as long: it has a name and bytes of its own.
  const SmallBlock other_block(5);
  const std::vector<kvmill_store_layer> other_layers = Inputs(other_block);
  const kvmill_store_block tails[] = {Block("other", other_layers, 20), Block("tail", layers, 20)};
  Outcome outcome = Finish(kvmill_store(client_, ns, tails, 2, nullptr, nullptr, queue_, 1));
  ASSERT_EQ(BlockOf(outcome, 0).code, KVMILL_OK) << BlockOf(outcome, 0).message;
  ASSERT_EQ(BlockOf(outcome, 1).code, KVMILL_OK) << BlockOf(outcome, 1).message;
  EXPECT_EQ(BlockOf(outcome, 1).outcome, static_cast<uint32_t>(KVMILL_BLOCK_STORED));
  const kvmill_store_block unnamed = Block("", layers, 20);
  EXPECT_EQ(kvmill_store(client_, ns, &unnamed, 1, nullptr, nullptr, queue_, 1), KVMILL_OK);
  outcome = Finish(KVMILL_OK);
  EXPECT_EQ(outcome.event.code, KVMILL_INVALID_ARGUMENT);
  EXPECT_NE(outcome.message().find("a tail needs one as well"), std::string::npos)
      << outcome.message();

  const std::string name = "tail", absent = "absent";
  std::vector<kvmill_tail> wanted(3, Init<kvmill_tail>());
  wanted[0].key = wanted[1].key = Key(name);
  wanted[0].token_count = 19;
  wanted[1].token_count = 20;
  wanted[2].key = Key(absent);
  wanted[2].token_count = 63;
  const Outcome looked =
      Finish(kvmill_lookup(client_, ns, nullptr, 0, wanted.data(), 3, nullptr, queue_, 2));
  auto found = Init<kvmill_lookup_result>();
  ASSERT_EQ(kvmill_result_lookup(looked.result.get(), &found), KVMILL_OK);
  ASSERT_EQ(found.tail_tokens, 20u);
  std::uint8_t want[32];
  ASSERT_EQ(kvmill_tail_key({nullptr, 0}, 20, Key(name), want), KVMILL_OK);
  ASSERT_EQ(found.tail_key.bytes, sizeof(want));
  EXPECT_EQ(memcmp(found.tail_key.data, want, sizeof(want)), 0);

  SmallBlock got;
  std::vector<kvmill_fetch_output> outputs = Outputs(&got);
  outputs[1].v.tokens = 19;
  outcome = Finish(kvmill_fetch(client_, ns, &found.tail_key, 1, outputs.data(), 2, nullptr,
                                nullptr, queue_, 3));
  EXPECT_EQ(BlockOf(outcome).code, KVMILL_OUT_OF_RANGE);
  outputs[1].v.tokens = 20;
  outcome = Finish(kvmill_fetch(client_, ns, &found.tail_key, 1, outputs.data(), 2, nullptr,
                                nullptr, queue_, 4));
  ASSERT_EQ(BlockOf(outcome).code, KVMILL_OK) << BlockOf(outcome).message;
  EXPECT_EQ(BlockOf(outcome).token_count, 20u);
  EXPECT_EQ(block.RelativeError(got, 20), 0);
  EXPECT_EQ(got.values[0][20 * 2 * 64], 0) << "nothing behind the tail is written";
  auto options = Init<kvmill_fetch_options>();
  options.form = KVMILL_FORM_RECORDS;
  std::vector<std::uint8_t> records(2 * kvmill_namespace_record_bytes(ns, 0));
  for (kvmill_fetch_output& output : outputs) {
    output.data = records.data();
    output.data_bytes = records.size();
  }
  outcome = Finish(kvmill_fetch(client_, ns, &found.tail_key, 1, outputs.data(), 2, &options,
                                nullptr, queue_, 5));
  EXPECT_EQ(BlockOf(outcome).code, KVMILL_FAILED_PRECONDITION);
  kvmill_namespace_free(ns);
}

}  // namespace
}  // namespace kvmill::testing
