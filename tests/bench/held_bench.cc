// What it costs the store to tell of its blocks: to HeldRuns, which keeps account of them, and to
// the journal of events, unread, with a reader as a call of Watch is one, and with the publisher of
// --events and a subscriber.
//
// Small blocks are copied in (BeginCopy: no encoder in the way) and removed, in all these ways by
// turns; lines have medians over the rounds, the least and the most.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "service/event_journal.h"
#include "service/event_publisher.h"
#include "service/held_runs.h"
#include "storage/core/check.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
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

void StoreAll(TieredStore& store, NamespaceId space, const std::vector<Block>& blocks) {
  for (const Block& block : blocks) {
    auto copy =
        store.BeginCopy({space, 0, block.key}, block.origin,
                        {static_cast<std::uint32_t>(block.page.size())}, absl::ZeroDuration());
    KVMILL_CHECK(copy.ok());
    std::memcpy(copy->pages()[0].data(), block.page.data(), block.page.size());
    KVMILL_CHECK(copy->Commit().ok());
  }
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

// A thread that reads what there is, as it comes.
class ReadingThread {
 public:
  explicit ReadingThread(EventJournal& journal) : journal_(journal) {
    reader_ = *journal.Open("default", {.snapshot = true}, [this] { Wake(); });
    thread_ = std::thread([this] { Run(); });
  }
  ~ReadingThread() {
    {
      MutexLock lock(mu_);
      ending_ = true;
    }
    woken_cv_.NotifyAll();
    thread_.join();
    journal_.Close(reader_);
    MutexLock lock(mu_);  // A wake may be running.
  }
  std::size_t events() const { return events_.load(std::memory_order_relaxed); }

 private:
  void Wake() {
    MutexLock lock(mu_);
    woken_ = true;
    woken_cv_.NotifyAll();
  }
  void Run() {
    for (;;) {
      EventJournal::Part part;
      for (auto some = journal_.Next(*reader_, &part); some.ok() && *some;
           some = journal_.Next(*reader_, &part)) {
        events_.fetch_add(part.events.size(), std::memory_order_relaxed);
      }
      MutexLock lock(mu_);
      while (!woken_ && !ending_) woken_cv_.Wait(mu_);
      woken_ = false;
      if (ending_) return;
    }
  }

  EventJournal& journal_;
  EventJournal::ReaderPtr reader_;
  std::atomic<std::size_t> events_{0};
  Mutex mu_;
  CondVar woken_cv_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// A thread that takes the messages of a publisher and drops them.
class SubscribedThread {
 public:
  explicit SubscribedThread(const std::string& address) {
    socket_.set(zmq::sockopt::subscribe, "");
    socket_.set(zmq::sockopt::rcvtimeo, 20);
    socket_.connect(address);
    thread_ = std::thread([this] {
      zmq::message_t part;
      while (!ending_.load(std::memory_order_acquire)) {
        if (socket_.recv(part).has_value()) parts_.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  ~SubscribedThread() {
    ending_.store(true, std::memory_order_release);
    thread_.join();
  }
  std::size_t parts() const { return parts_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> ending_{false};
  std::atomic<std::size_t> parts_{0};
  zmq::context_t context_{1};
  zmq::socket_t socket_{context_, zmq::socket_type::sub};  // Of the thread.
  std::thread thread_;
};

enum class Read : std::uint8_t { kNot, kWatched, kPublished };

void EventsRound(const std::vector<Block>& blocks, Read read, Times* times) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const double count = static_cast<double>(blocks.size());
  EventJournal journal({});
  TieredStore::Options options;
  options.host_bytes = (blocks.size() * 8192 / (std::uint64_t{64} << 20) + 1) * (64 << 20);
  options.arena_bytes = 64 << 20;
  options.observer = &journal;
  const Clock& clock = SystemClock();
  auto store = TieredStore::Create(options, clock, nullptr);
  KVMILL_CHECK(store.ok());
  journal.Start(**store);
  const NamespaceId space = (*store)->OpenNamespace("bench", Spec())->id;
  std::unique_ptr<ReadingThread> reader;
  std::unique_ptr<EventPublisher> publisher;
  std::unique_ptr<SubscribedThread> subscriber;
  if (read == Read::kWatched) reader = std::make_unique<ReadingThread>(journal);
  if (read == Read::kPublished) {
    EventPublisher::Options publish;
    publish.tenant = "default";
    publish.address = {"127.0.0.1", 0};
    publish.topic = "bench";
    publisher = *EventPublisher::Start(publish, journal, **store, clock);
    subscriber = std::make_unique<SubscribedThread>(publisher->address());
    // Its subscription takes a moment.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (read != Read::kNot) journal.WaitSettled();
  const auto begin = now();
  StoreAll(**store, space, blocks);
  const auto stored = now();
  times->store.push_back(Seconds(stored - begin) / count * 1e9);
  if (read != Read::kNot) {
    journal.WaitSettled();
    times->settle.push_back(Seconds(now() - stored));
    KVMILL_CHECK(journal.stats().blocks == blocks.size());
  }
  const auto removing = now();
  for (const Block& block : blocks) KVMILL_CHECK((*store)->Remove(space, {block.key}).ok());
  times->remove.push_back(Seconds(now() - removing) / count * 1e9);
  if (reader != nullptr) {
    journal.WaitSettled();
    KVMILL_CHECK(reader->events() > 0);
  }
  if (subscriber != nullptr) KVMILL_CHECK(subscriber->parts() > 0);
  reader.reset();
  publisher.reset();
  journal.Stop(absl::OkStatus());
}

void Round(const std::vector<Block>& blocks, bool observed, Times* times) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const double count = static_cast<double>(blocks.size());
  HeldRuns held({.queue_max = 16384});
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
  StoreAll(**store, space, blocks);
  const auto stored = now();
  times->store.push_back(Seconds(stored - begin) / count * 1e9);
  if (observed) {
    held.WaitSettled();
    times->settle.push_back(Seconds(now() - stored));
    KVMILL_CHECK(held.stats().blocks == blocks.size());
    // As after a restart.
    HeldRuns anew({.gather = std::chrono::milliseconds(0)});
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

std::string Spread(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return absl::StrFormat("%.0f (%.0f to %.0f)", Median(values), *least, *most);
}

void Print(const char* what, const Times& times) {
  std::printf("%-28s %-26s %-26s\n", what, Spread(times.store).c_str(),
              Spread(times.remove).c_str());
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  CLI::App app("What it costs to know which blocks are here.");
  std::size_t blocks = 50000;
  int rounds = 7;
  app.add_option("--blocks", blocks, "Of a round")->check(CLI::Range(1, 1 << 20));
  app.add_option("--rounds", rounds, "In each way")->check(CLI::Range(1, 99));
  CLI11_PARSE(app, argc, argv);
  const std::vector<kvmill::Block> made = kvmill::MakeBlocks(blocks);
  kvmill::Times with, without, unread, watched, published;
  using kvmill::Read;
  for (int round = 0; round < rounds; ++round) {
    kvmill::Round(made, false, &without);
    kvmill::Round(made, true, &with);
    kvmill::EventsRound(made, Read::kNot, &unread);
    kvmill::EventsRound(made, Read::kWatched, &watched);
    kvmill::EventsRound(made, Read::kPublished, &published);
  }
  using kvmill::Median;
  std::printf("ns a block, median (least to most) of %d rounds by turns\n", rounds);
  std::printf("%-28s %-26s %-26s\n", "", "store", "remove");
  kvmill::Print("nobody is told", without);
  kvmill::Print("HeldRuns", with);
  kvmill::Print("events, Watch off", unread);
  kvmill::Print("events, Watch on", watched);
  kvmill::Print("events, ZeroMQ on", published);
  std::printf(
      "entered in HeldRuns %.1f ms after the last block, told %.1f (Watch), %.1f (ZeroMQ)\n",
      Median(with.settle) * 1e3, Median(watched.settle) * 1e3, Median(published.settle) * 1e3);
  std::printf("a walk of the store: %.0f ns a block\n", Median(with.walk));
  return 0;
}
