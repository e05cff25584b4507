// What it costs the store to tell of its blocks: to HeldRuns, which keeps account of them, and to
// the journal of events, without and with a reader.
//
// Small blocks are copied in (BeginCopy: no encoder in the way) and removed, in stores with and
// without an observer by turns; times are medians over the rounds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "service/event_journal.h"
#include "service/held_runs.h"
#include "storage/core/check.h"
#include "storage/core/page_layout.h"
#include "storage/tiered_store.h"

namespace kvmill {
namespace {

constexpr std::uint16_t kTokens = 64;
constexpr std::size_t kSequenceBlocks = 256;

NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.tenant = "default";
  spec.model = "bench";
  spec.hash_scheme = "bench-1";
  spec.block_tokens = kTokens;
  LayerGroup group;
  group.layers = {0};
  group.kv_heads = 1;
  group.head_dim = 64;
  spec.groups = {group};
  return spec;
}

struct Block {
  BlockKey key;
  BlockOrigin origin;
  std::vector<std::byte> page;
};

std::vector<Block> MakeBlocks(std::size_t count) {
  const NamespaceSpec spec = Spec();
  PageIdentity identity;
  identity.fingerprint = FingerprintOf(spec);
  identity.head_count = 1;
  identity.token_count = kTokens;
  identity.format = FormatOf(spec, spec.groups[0]);
  identity.source_dtype = spec.source_dtype;
  identity.frame = spec.frame;
  std::vector<Block> blocks(count);
  for (std::size_t i = 0; i < count; ++i) {
    Block& block = blocks[i];
    block.key = *BlockKey::FromBytes(absl::StrFormat("block-%026d", i));
    block.origin.token_count = kTokens;
    block.origin.block_index = static_cast<std::uint32_t>(i % kSequenceBlocks);
    if (block.origin.block_index > 0) block.origin.parent = blocks[i - 1].key;
    identity.key = block.key;
    const SlotKind kind = SlotKind::kTile;
    block.page.resize(PageBytes(identity.format, kTokens, {kind}));
    InitPage(identity, {kind}, absl::MakeSpan(block.page));
    SealPage(absl::MakeSpan(block.page));
  }
  return blocks;
}

double Seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

struct Times {
  std::vector<double> store, remove, settle, walk;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Until everything is read.
void ReadAll(EventJournal& journal, EventJournal::Reader& reader, std::size_t* events) {
  EventJournal::Part part;
  while (*journal.Next(reader, &part)) *events += part.events.size();
}

void EventsRound(const std::vector<Block>& blocks, bool read, Times* times) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const double count = static_cast<double>(blocks.size());
  EventJournal journal({});
  TieredStore::Options options;
  options.host_bytes = (blocks.size() * 8192 / (std::uint64_t{64} << 20) + 1) * (64 << 20);
  options.arena_bytes = 64 << 20;
  options.observer = &journal;
  auto store = TieredStore::Create(options, SystemClock(), nullptr);
  KVMILL_CHECK(store.ok());
  journal.Start(**store);
  const NamespaceId space = (*store)->OpenNamespace("bench", Spec())->id;
  EventJournal::ReaderPtr reader;
  std::size_t events = 0;
  if (read) {
    reader = *journal.Open("default", {.snapshot = true}, [] {});
    journal.WaitSettled();
    ReadAll(journal, *reader, &events);
  }
  const auto begin = now();
  for (const Block& block : blocks) {
    auto copy =
        (*store)->BeginCopy({space, 0, block.key}, block.origin,
                            {static_cast<std::uint32_t>(block.page.size())}, absl::ZeroDuration());
    KVMILL_CHECK(copy.ok());
    std::memcpy(copy->pages()[0].data(), block.page.data(), block.page.size());
    KVMILL_CHECK(copy->Commit().ok());
  }
  const auto stored = now();
  times->store.push_back(Seconds(stored - begin) / count * 1e9);
  if (read) {
    journal.WaitSettled();
    times->settle.push_back(Seconds(now() - stored));
    KVMILL_CHECK(journal.stats().blocks == blocks.size());
    ReadAll(journal, *reader, &events);
  }
  const auto removing = now();
  for (const Block& block : blocks) KVMILL_CHECK((*store)->Remove(space, {block.key}).ok());
  times->remove.push_back(Seconds(now() - removing) / count * 1e9);
  if (read) journal.Close(reader);
  journal.Stop(absl::OkStatus());
}

void Round(const std::vector<Block>& blocks, bool observed, Times* times) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const double count = static_cast<double>(blocks.size());
  HeldRuns held({.tenant = "default", .queue_max = 16384});
  TieredStore::Options options;
  options.host_bytes = (blocks.size() * 8192 / (std::uint64_t{64} << 20) + 1) * (64 << 20);
  options.arena_bytes = 64 << 20;
  options.observer = observed ? &held : nullptr;
  auto store = TieredStore::Create(options, SystemClock(), nullptr);
  KVMILL_CHECK(store.ok());
  const NamespaceId space = (*store)->OpenNamespace("bench", Spec())->id;
  if (observed) {
    held.Start(**store, nullptr);
    held.WaitSettled();
  }
  const auto begin = now();
  for (const Block& block : blocks) {
    auto copy =
        (*store)->BeginCopy({space, 0, block.key}, block.origin,
                            {static_cast<std::uint32_t>(block.page.size())}, absl::ZeroDuration());
    KVMILL_CHECK(copy.ok());
    std::memcpy(copy->pages()[0].data(), block.page.data(), block.page.size());
    KVMILL_CHECK(copy->Commit().ok());
  }
  const auto stored = now();
  times->store.push_back(Seconds(stored - begin) / count * 1e9);
  if (observed) {
    held.WaitSettled();
    times->settle.push_back(Seconds(now() - stored));
    KVMILL_CHECK(held.stats().blocks == blocks.size());
    // As after a restart.
    HeldRuns anew({.tenant = "default", .gather = std::chrono::milliseconds(0)});
    const auto walk = now();
    anew.Start(**store, nullptr);
    anew.WaitSettled();
    times->walk.push_back(Seconds(now() - walk) / count * 1e9);
    KVMILL_CHECK(anew.stats().blocks == blocks.size());
  }
  const auto removing = now();
  for (const Block& block : blocks) KVMILL_CHECK((*store)->Remove(space, {block.key}).ok());
  times->remove.push_back(Seconds(now() - removing) / count * 1e9);
  held.Stop();
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  CLI::App app("What it costs to know which blocks are here.");
  std::size_t blocks = 50000;
  int rounds = 7;
  app.add_option("--blocks", blocks, "Of a round")->check(CLI::Range(1, 1 << 20));
  app.add_option("--rounds", rounds, "With and without an observer each")->check(CLI::Range(1, 99));
  CLI11_PARSE(app, argc, argv);
  const std::vector<kvmill::Block> made = kvmill::MakeBlocks(blocks);
  kvmill::Times with, without, unread, read;
  for (int round = 0; round < rounds; ++round) {
    kvmill::Round(made, false, &without);
    kvmill::Round(made, true, &with);
    kvmill::EventsRound(made, false, &unread);
    kvmill::EventsRound(made, true, &read);
  }
  using kvmill::Median;
  std::printf("store: %.0f ns a block, %.0f with an observer\n", Median(without.store),
              Median(with.store));
  std::printf("remove: %.0f ns a block, %.0f with an observer\n", Median(without.remove),
              Median(with.remove));
  std::printf("entered %.1f ms after the last block; a walk: %.0f ns a block\n",
              Median(with.settle) * 1e3, Median(with.walk));
  std::printf(
      "events: store %.0f ns a block unread, %.0f read; remove %.0f and %.0f; in the "
      "journal %.1f ms after the last block\n",
      Median(unread.store), Median(read.store), Median(unread.remove), Median(read.remove),
      Median(read.settle) * 1e3);
  return 0;
}
