// What a worker reads: copies and mapped pages, each byte compared with the model.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/stress/stress_worker.h"

namespace kvmill::stress {
namespace {

constexpr std::size_t kHeldMax = 4;
constexpr unsigned kAll = (1u << kVariants) - 1;

}  // namespace

class Worker::Sink : public FetchSink {
 public:
  Sink(Worker& worker, const Target& target, bool own_memory)
      : worker_(worker), target_(target), own_memory_(own_memory) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    if (!own_memory_) return {};
    std::vector<std::byte>& page = pages_[{id.block, id.group, id.layer_index}];
    page.resize(page_bytes);
    return absl::MakeSpan(page);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const unsigned got =
        worker_.model_.Matching(target_.space, target_.name, id.block, target_.variants(), page);
    matching[id.block][id.group] &= got;
    ++pages[id.block][id.group];
    return absl::OkStatus();
  }
  std::array<std::array<unsigned, 2>, kBlocks> matching = [] {
    std::array<std::array<unsigned, 2>, kBlocks> all;
    for (auto& block : all) block.fill(kAll);
    return all;
  }();
  std::array<std::array<unsigned, 2>, kBlocks> pages{};

 private:
  Worker& worker_;
  const Target& target_;
  const bool own_memory_;
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::vector<std::byte>> pages_;
};

void Worker::Fetch() {
  const Target target = Pick();
  Sink sink(*this, target, OneIn(2));
  const auto fetched = AnyClientFor(target).Fetch(clients_.spaces[static_cast<int>(target.space)],
                                                  KeysOf(target.name), sink, AnyTimeout());
  ++did_["fetch"];
  if (!fetched.ok()) CheckFailure(fetched.status(), "fetch");
  const std::uint32_t layers = kLayers / GroupCount(target.space);
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const absl::Status& status = fetched.ok() ? fetched->blocks[b].status : fetched.status();
    if (fetched.ok() && !status.ok() && !absl::IsNotFound(status)) {
      CheckFailure(status, "fetch block");
    }
    for (std::uint32_t g = 0; g < GroupCount(target.space); ++g) {
      // Whatever came was whole, also of a call that failed afterwards.
      if (sink.pages[b][g] > 0) NotePages(target, b, g, sink.matching[b][g], "fetch");
      if (status.ok() && sink.pages[b][g] != layers) {
        Wrong(absl::StrCat("fetch: ", sink.pages[b][g], " pages of group ", g, ", want ", layers));
      }
    }
    if (status.ok()) ++did_["fetched blocks"];
  }
}

void Worker::Map() {
  const Target target = Pick();
  const absl::Duration lease =
      absl::Milliseconds(static_cast<std::int64_t>(OneIn(3) ? 1 + Below(30) : 100 + Below(2000)));
  Client& client = OnOtherNode(target) ? *clients_.other : *clients_.local;
  auto mapped = client.Map(clients_.spaces[static_cast<int>(target.space)], KeysOf(target.name),
                           {.lease = lease}, AnyTimeout());
  ++did_["map"];
  if (!mapped.ok()) return CheckFailure(mapped.status(), "map");
  Held held;
  held.target = target;
  held.mapped = *std::move(mapped);
  if (target.own != nullptr) held.seen = *target.own;
  // What is stored after this moment is not what was mapped, but may have the same name.
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const absl::Status& status = held.mapped->status(b);
    if (!status.ok() && !absl::IsNotFound(status)) CheckFailure(status, "map block");
    if (status.ok()) ++did_["mapped blocks"];
  }
  LookAt(held);
  if (target.space == Space::kTiles && target.own == nullptr) AttendTo(held);
  if (OneIn(4)) {
    const absl::Status renewed =
        client.Renew(*held.mapped, absl::Milliseconds(1 + static_cast<int>(Below(500))));
    if (!renewed.ok()) CheckFailure(renewed, "renew");
    ++did_["renew"];
    LookAt(held);
  }
  if (OneIn(12)) OutlastLease(held);
  if (!OneIn(3)) return;  // Released.
  if (held_.size() == kHeldMax) held_.erase(held_.begin() + static_cast<int>(Below(kHeldMax)));
  held_.push_back(std::move(held));
}

// Compares in place; what is read counts when Check says so afterwards.
void Worker::LookAt(Held& held) {
  const Target& target = held.target;
  const std::uint32_t groups = GroupCount(target.space);
  std::array<std::array<unsigned, 2>, kBlocks> matching{};
  std::array<std::array<bool, 2>, kBlocks> seen{};
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    for (std::uint32_t g = 0; g < groups; ++g) {
      matching[b][g] = kAll;
      for (std::uint32_t layer = 0; layer < kLayers / groups; ++layer) {
        const auto page = held.mapped->Page(b, g, layer);
        if (!page.ok()) {
          if (absl::IsAborted(page.status())) {
            ++did_["look aborted"];
            return;
          }
          if (!absl::IsNotFound(page.status())) CheckFailure(page.status(), "look");
          continue;
        }
        seen[b][g] = true;
        matching[b][g] &= model_.Matching(target.space, target.name, b, target.variants(), *page);
      }
    }
  }
  const absl::Status counts = held.mapped->Check();
  ++did_["look"];
  if (!counts.ok()) {
    if (!absl::IsAborted(counts)) Wrong("check: " + counts.ToString());
    ++did_["look aborted"];
    return;
  }
  Target then = target;
  if (target.own != nullptr) then.own = &held.seen;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    for (std::uint32_t g = 0; g < groups; ++g) {
      if (seen[b][g]) NotePages(then, b, g, matching[b][g], "map");
    }
  }
}

void Worker::AttendTo(Held& held) {
  for (std::uint32_t b = 0; b < kWholeBlocks; ++b) {
    if (!held.mapped->status(b).ok()) return;
  }
  const auto layer = static_cast<std::uint32_t>(Below(kLayers));  // Each a group of its own.
  std::vector<AttentionBlock> table(kWholeBlocks * kHeads);
  const absl::Status filled =
      FillAttentionBlocks(*held.mapped, layer, 0, 0, kWholeBlocks, absl::MakeSpan(table));
  if (!filled.ok()) return CheckFailure(filled, "attend");
  const std::vector<float> in_place = Attend(table);
  const absl::Status counts = held.mapped->Check();
  if (!counts.ok()) return CheckFailure(counts, "attend");
  ++did_["attend"];
  if (in_place != Attend(model_.AttentionBlocksOf(held.target.name, 0, layer))) {
    Wrong("attention in place over " + held.target.name + " is not that over its records");
  }
}

void Worker::OutlastLease(Held& held) {
  const absl::Duration left = held.mapped->deadline() - absl::Now();
  if (left > absl::Milliseconds(150)) return;
  absl::SleepFor(std::max(left, absl::ZeroDuration()) + absl::Milliseconds(2));
  ++did_["outlast"];
  if (!absl::IsAborted(held.mapped->Check()) || held.mapped->Page(0, 0, 0).ok()) {
    Wrong("a reader past its lease was not told");
  }
}

}  // namespace kvmill::stress
