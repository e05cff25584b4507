#include "tests/storage/eviction_workloads.h"

#include <cstddef>
#include <deque>

namespace kvmill {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Below(std::uint64_t limit) {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % limit;
  }

  // Of `count` things, number i with a weight of 1 / (i + 1).
  std::size_t Zipf(std::size_t count) {
    constexpr std::uint64_t kOne = 1u << 20;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; ++i) total += kOne / (i + 1);
    std::uint64_t draw = Below(total);
    for (std::size_t i = 0;; ++i) {
      if (draw < kOne / (i + 1)) return i;
      draw -= kOne / (i + 1);
    }
  }

 private:
  std::uint64_t state_;
};

class Ids {
 public:
  void Append(std::uint64_t count, std::vector<std::uint64_t>* prompt) {
    for (std::uint64_t i = 0; i < count; ++i) prompt->push_back(next_++);
  }

 private:
  std::uint64_t next_ = 0;
};

class Chat {
 public:
  Chat(std::uint64_t seed, Ids& ids) : random_(seed), ids_(ids), systems_(8) {
    for (auto& system : systems_) ids_.Append(4 + random_.Below(9), &system);
  }

  std::vector<std::uint64_t> Next() {
    std::vector<std::uint64_t> prompt;
    // Of the last 300 that continue, about every other request picks one; the youngest tenth are
    // still being read by their users.
    if (open_.size() >= 300 || (open_.size() > 30 && random_.Below(2) == 0)) {
      const std::size_t pick = random_.Below(open_.size() - open_.size() / 10);
      prompt = std::move(open_[pick]);
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(pick));
      ids_.Append(1 + random_.Below(6), &prompt);
    } else {
      prompt = systems_[random_.Zipf(systems_.size())];
      ids_.Append(3 + random_.Below(18), &prompt);
    }
    if (random_.Below(10) < 6) open_.push_back(prompt);
    return prompt;
  }

 private:
  Random random_;
  Ids& ids_;
  std::vector<std::vector<std::uint64_t>> systems_;
  std::deque<std::vector<std::uint64_t>> open_;  // Will continue; oldest first.
};

}  // namespace

Trace ChatTrace(std::uint64_t seed, int requests) {
  Ids ids;
  Chat chat(seed, ids);
  Trace trace;
  for (int i = 0; i < requests; ++i) trace.push_back(chat.Next());
  return trace;
}

Trace ScanTrace(std::uint64_t seed, int requests) {
  Ids ids;
  Chat chat(seed, ids);
  Trace trace;
  for (int i = 0; i < requests; ++i) {
    if (i % 2 == 0) {
      trace.push_back(chat.Next());
    } else {
      ids.Append(60, &trace.emplace_back());
    }
  }
  return trace;
}

Trace DocumentsTrace(std::uint64_t seed, int requests) {
  Ids ids;
  Random random(seed);
  std::vector<std::vector<std::uint64_t>> documents(400);
  for (auto& document : documents) ids.Append(40, &document);
  Trace trace;
  for (int i = 0; i < requests; ++i) {
    const std::size_t rank = random.Zipf(documents.size());
    const bool shifted = i >= requests / 2;
    trace.push_back(documents[shifted ? documents.size() - 1 - rank : rank]);
    ids.Append(2, &trace.back());
  }
  return trace;
}

Trace LoopTrace(int chains, int rounds) {
  Ids ids;
  std::vector<std::vector<std::uint64_t>> prompts(static_cast<std::size_t>(chains));
  for (auto& prompt : prompts) ids.Append(10, &prompt);
  Trace trace;
  for (int round = 0; round < rounds; ++round) {
    trace.insert(trace.end(), prompts.begin(), prompts.end());
  }
  return trace;
}

}  // namespace kvmill
