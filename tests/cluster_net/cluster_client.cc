// An engine without a model, for tests of clusters: every byte it reads is compared with the shadow
// model of the stress test (tests/stress/stress_model.h), in which a name says what bytes a
// sequence has.
//
//   cluster_client SERVER MODE SETS FIRST COUNT [THREADS PAUSE_MS SEED]
//
// SETS are names of sets of sequences, "a,b"; a set has COUNT sequences from number FIRST on. MODE:
//   fill    stores them all, until each is there,
//   check   looks each up and fetches what was found, once,
//   load    until its input ends: picks one at random, looks it up, fetches what was found, and
//           stores what was not, as an engine does; PAUSE_MS between two,
//   read    the same and stores nothing.
// In the last two the engine stays when its daemon is away (WhenAway::kMiss): "away" counts calls
// that no daemon answered, "dropped" blocks that none took; they are no errors.
// Prints one line of JSON at the end of fill and check, and in the other modes for each line of
// input "SEQUENCES HITS", once so much has happened since the last one, or after 40 s, with what
// did. Exit code 70 and a line "WRONG: ..." for wrong
// bytes, 1 when it could not begin.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "tests/stress/stress_model.h"

namespace kvmill::stress {
namespace {

constexpr Space kSpace = Space::kTiles;
constexpr absl::Duration kCallTimeout = absl::Seconds(20);  // More than anybody may wait.
constexpr absl::Duration kBeginTimeout = absl::Seconds(30);
constexpr absl::Duration kHappensTimeout = absl::Seconds(40);

// What happened; added up over threads.
class Tally {
 public:
  void Add(const std::string& what, std::uint64_t count = 1) {
    const std::lock_guard<std::mutex> lock(mu_);
    counts_[what] += count;
  }
  void AddError(const char* call, const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mu_);
    ++errors_[absl::StrCat(call, " ", absl::StatusCodeToString(status.code()))];
    if (first_error_.empty()) first_error_ = absl::StrCat(call, ": ", status.ToString());
  }
  void AddTime(const char* call, absl::Duration took) {
    const std::lock_guard<std::mutex> lock(mu_);
    times_[call].push_back(absl::ToDoubleMilliseconds(took));
  }
  std::uint64_t Count(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mu_);
    return counts_[what];
  }
  // And begins anew.
  std::string TakeLine() {
    const std::lock_guard<std::mutex> lock(mu_);
    std::vector<std::string> fields;
    for (const char* name :
         {"sequences", "hits", "misses", "stored", "existing", "dropped", "away"}) {
      fields.push_back(absl::StrCat("\"", name, "\": ", counts_[name]));
    }
    std::vector<std::string> errors;
    for (const auto& [what, count] : errors_) {
      errors.push_back(absl::StrCat("\"", what, "\": ", count));
    }
    fields.push_back(absl::StrCat("\"errors\": {", absl::StrJoin(errors, ", "), "}"));
    for (char& c : first_error_) {
      if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ') c = '\'';
    }
    fields.push_back(absl::StrCat("\"first_error\": \"", first_error_, "\""));
    for (const char* call : {"lookup", "fetch", "store"}) {
      std::vector<double>& times = times_[call];
      std::sort(times.begin(), times.end());
      const auto at = [&times](double share) {
        return times.empty()
                   ? 0.0
                   : times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
      };
      fields.push_back(absl::StrCat("\"", call, "_ms\": {\"p50\": ", at(0.5),
                                    ", \"p99\": ", at(0.99), ", \"max\": ", at(1), "}"));
    }
    counts_.clear();
    errors_.clear();
    times_.clear();
    first_error_.clear();
    return absl::StrCat("{", absl::StrJoin(fields, ", "), "}");
  }

 private:
  std::mutex mu_;
  std::map<std::string, std::uint64_t> counts_, errors_;
  std::map<std::string, std::vector<double>> times_;
  std::string first_error_;
};

// Compares each page when it comes.
class ComparingSink : public FetchSink {
 public:
  ComparingSink(const Model& model, const std::string& sequence)
      : model_(model), sequence_(sequence) {}
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    if (model_.Matching(kSpace, sequence_, id.block, 1, page) == 0) {
      Wrong(absl::StrCat(sequence_, " block ", id.block, " group ", id.group,
                         " has bytes that nobody stored"));
    }
    ++pages[id.block];
    return absl::OkStatus();
  }
  std::uint32_t pages[kBlocks] = {};

 private:
  const Model& model_;
  const std::string& sequence_;
};

class Engine {
 public:
  Engine(Client& client, ClientNamespace ns, const Model& model, Tally& tally)
      : client_(client), ns_(std::move(ns)), model_(model), tally_(tally) {}

  // Number of whole blocks that are there, from the first on.
  std::uint32_t Lookup(const std::string& sequence) {
    std::vector<BlockKey> keys = KeysOf(sequence);
    keys.pop_back();
    const TailCandidate tail{TailsOwnKey(sequence), TailTokens(sequence), kWholeBlocks};
    const absl::Time begin = absl::Now();
    const auto found = client_.Lookup(ns_, keys, {&tail, 1});
    tally_.AddTime("lookup", absl::Now() - begin);
    if (!found.ok()) {
      tally_.AddError("lookup", found.status());
      return 0;
    }
    AddAway(found->away);
    return found->hit_blocks + (found->tail_tokens > 0 ? 1 : 0);
  }

  // Of the first `count` blocks those that came.
  std::uint32_t Fetch(const std::string& sequence, std::uint32_t count) {
    std::vector<BlockKey> keys = KeysOf(sequence);
    keys.resize(count);
    ComparingSink sink(model_, sequence);
    const absl::Time begin = absl::Now();
    const auto fetched = client_.Fetch(ns_, keys, sink);
    tally_.AddTime("fetch", absl::Now() - begin);
    if (!fetched.ok()) {
      tally_.AddError("fetch", fetched.status());
      return 0;
    }
    AddAway(fetched->away);
    std::uint32_t came = 0;
    for (std::uint32_t b = 0; b < count; ++b) {
      const absl::Status& status = fetched->blocks[b].status;
      if (!status.ok() && !absl::IsNotFound(status)) tally_.AddError("fetch block", status);
      if (!status.ok()) continue;
      if (sink.pages[b] != kLayers) {
        Wrong(absl::StrCat(sequence, " block ", b, ": ", sink.pages[b], " pages, want ", kLayers));
      }
      ++came;
    }
    return came;
  }

  // Whether all of it is there now.
  bool Store(const std::string& sequence) {
    const StoreInput input(model_, kSpace, sequence, 0, {});
    const absl::Time begin = absl::Now();
    const auto stored = client_.Store(ns_, input.blocks(), {});
    tally_.AddTime("store", absl::Now() - begin);
    if (!stored.ok()) {
      tally_.AddError("store", stored.status());
      return false;
    }
    tally_.Add("stored", stored->blocks_stored);
    tally_.Add("existing", stored->blocks_existing);
    tally_.Add("dropped", stored->blocks_dropped);
    AddAway(stored->away);
    bool whole = true;
    for (const StoreBlockResult& block : stored->blocks) {
      // Two engines that store the same block help each other, and no room is no fault.
      if (!block.status.ok() && !absl::IsResourceExhausted(block.status)) {
        tally_.AddError("store block", block.status);
      }
      whole &= block.status.ok() && block.outcome != StoreOutcome::kDropped;
    }
    return whole;
  }

  void Serve(const std::string& sequence, bool stores) {
    const std::uint32_t found = Lookup(sequence);
    const std::uint32_t came = found == 0 ? 0 : Fetch(sequence, found);
    tally_.Add("sequences");
    tally_.Add("hits", came);
    tally_.Add("misses", kBlocks - came);
    if (stores && came < kBlocks) Store(sequence);
  }

 private:
  void AddAway(const absl::Status& why) {
    if (!why.ok()) tally_.Add("away");
  }

  Client& client_;
  const ClientNamespace ns_;
  const Model& model_;
  Tally& tally_;
};

struct Arguments {
  std::string server, mode;
  std::vector<std::string> sets;
  std::uint64_t first = 0, count = 0, threads = 1, pause_ms = 0, seed = 1;
};

bool Parse(const std::vector<std::string>& words, Arguments* arguments) {
  if (words.size() < 5 || words.size() > 8) return false;
  arguments->server = words[0];
  arguments->mode = words[1];
  arguments->sets = absl::StrSplit(words[2], ',');
  std::uint64_t* const numbers[] = {&arguments->first, &arguments->count, &arguments->threads,
                                    &arguments->pause_ms, &arguments->seed};
  for (std::size_t i = 3; i < words.size(); ++i) {
    if (!absl::SimpleAtoi(words[i], numbers[i - 3])) return false;
  }
  const std::vector<std::string> modes = {"fill", "check", "load", "read"};
  return std::find(modes.begin(), modes.end(), arguments->mode) != modes.end() &&
         arguments->count > 0 && arguments->threads > 0;
}

void Once(Engine& engine, const Arguments& arguments) {
  for (const std::string& set : arguments.sets) {
    for (std::uint64_t n = arguments.first; n < arguments.first + arguments.count; ++n) {
      const std::string sequence = absl::StrCat(set, "/", n);
      if (arguments.mode == "check") {
        engine.Serve(sequence, false);
        continue;
      }
      const absl::Time end = absl::Now() + kBeginTimeout;
      while (!engine.Store(sequence) && absl::Now() < end) absl::SleepFor(absl::Milliseconds(20));
    }
  }
}

void Load(Engine& engine, const Arguments& arguments, Tally& tally) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < arguments.threads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(Mix(arguments.seed ^ Mix(t)));
      while (!stop) {
        const std::string& set = arguments.sets[random() % arguments.sets.size()];
        engine.Serve(absl::StrCat(set, "/", arguments.first + random() % arguments.count),
                     arguments.mode == "load");
        if (arguments.pause_ms > 0) usleep(static_cast<useconds_t>(arguments.pause_ms * 1000));
      }
    });
  }
  std::uint64_t sequences = 0, hits = 0;
  while (std::cin >> sequences >> hits) {
    const absl::Time end = absl::Now() + kHappensTimeout;
    while (absl::Now() < end &&
           (tally.Count("sequences") < sequences || tally.Count("hits") < hits)) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    std::cout << tally.TakeLine() << std::endl;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

int Main(const std::vector<std::string>& words) {
  Arguments arguments;
  if (!Parse(words, &arguments)) {
    std::cerr << "usage: cluster_client SERVER MODE SETS FIRST COUNT [THREADS PAUSE_MS SEED]\n";
    return 2;
  }
  const Model model(geteuid());
  Client::Options options;
  options.address = arguments.server;
  options.timeout = kCallTimeout;
  const bool lasts = arguments.mode == "load" || arguments.mode == "read";
  if (lasts) options.when_away = WhenAway::kMiss;
  const auto client = Client::Create(options);
  if (!client.ok()) {
    std::cerr << client.status() << "\n";
    return 1;
  }
  const absl::Time end = absl::Now() + kBeginTimeout;
  auto ns = (*client)->OpenNamespace(NameOf(kSpace), SpecOf(kSpace));
  while (!ns.ok() && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(50));
    ns = (*client)->OpenNamespace(NameOf(kSpace), SpecOf(kSpace));
  }
  if (!ns.ok()) {
    std::cerr << ns.status() << "\n";
    return 1;
  }
  Tally tally;
  Engine engine(**client, *ns, model, tally);
  if (lasts) {
    Load(engine, arguments, tally);
  } else {
    Once(engine, arguments);
    std::cout << tally.TakeLine() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace kvmill::stress

int main(int argc, char** argv) {
  return kvmill::stress::Main(std::vector<std::string>(argv + 1, argv + argc));
}
