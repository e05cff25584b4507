// What a worker stores: whole, by ranks, from its pages (stress_pages.h).
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/stress/stress_worker.h"

namespace kvmill::stress {

void Worker::Store() {
  const Target target = Pick();
  const auto variant = static_cast<unsigned>(Below(target.variants()));
  const StoreInput input(model_, target.space, target.name, variant, {});
  const auto stored =
      AnyClientFor(target).Store(clients_.spaces[static_cast<int>(target.space)], input.blocks(),
                                 {.wait_durable = OneIn(50)}, AnyTimeout());
  ++did_["store"];
  if (!stored.ok()) {
    CheckFailure(stored.status(), "store");
    if (target.own != nullptr) Forget(target.own);
    return;
  }
  bool forget = false;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const StoreBlockResult& block = stored->blocks[b];
    if (!block.status.ok()) CheckFailure(block.status, "store block");
    if (target.own == nullptr) continue;
    auto& allowed = target.own->allowed[b];
    switch (block.outcome) {
      case StoreOutcome::kStored:
        // Of two layer groups one may have been there.
        for (unsigned& group : allowed) group |= 1u << variant;
        break;
      case StoreOutcome::kExisting:
        if (allowed[0] == 0) {
          Wrong(
              absl::StrCat("store: ", target.name, " block ", b, " existed before it was stored"));
        }
        break;
      case StoreOutcome::kPartial:
        Wrong(absl::StrCat("store: ", target.name, " block ", b, " owes heads of a whole store"));
      case StoreOutcome::kDropped:
      case StoreOutcome::kFailed:
        forget = true;  // One layer group may be there.
        break;
    }
  }
  if (forget) Forget(target.own);
}

void Worker::StoreByRanks() {
  const Target target = Pick();
  if (target.own != nullptr) return;  // Halves of two variants could meet.
  const auto rank = [&](Client& client, std::uint32_t head) {
    const StoreInput input(model_, target.space, target.name, 0, {head, 1});
    return client
        .Store(clients_.spaces[static_cast<int>(target.space)], input.blocks(),
               {.head_begin = head, .head_count = 1}, {})
        .status();
  };
  Client& first = AnyClient();
  Client& second = AnyClient();
  const bool both = !OneIn(8);  // Else a rank that never comes.
  absl::Status other;
  std::thread beside;
  if (both) beside = std::thread([&] { other = rank(second, 1); });
  const absl::Status one = rank(first, 0);
  if (both) beside.join();
  ++did_["store by ranks"];
  for (const absl::Status& status : {one, other}) {
    if (!status.ok()) CheckFailure(status, "store by ranks");
  }
}

void Worker::StoreNotFinite() {
  const Target target{Space::kRaw, absl::StrCat("nan/", name_, "/", Below(20)), nullptr};
  const StoreInput input(model_, target.space, target.name, 0, {}, true);
  const auto stored =
      AnyClient().Store(clients_.spaces[static_cast<int>(target.space)], input.blocks(), {}, {});
  ++did_["store not finite"];
  if (!stored.ok()) {
    CheckFailure(stored.status(), "store not finite");
  } else if (stored->blocks[0].outcome != StoreOutcome::kFailed) {
    Wrong("store: a block with a NaN was taken");
  }
}

void Worker::StorePages() {
  const bool own = OneIn(3);
  const auto space = static_cast<Space>(Below(kSpaces));
  // A private one has a name that nothing else has until it is all there.
  const std::string sequence =
      own ? absl::StrCat("own/", name_, "/", ++names_) : AnySharedName(space);
  pages_.Start(space, sequence, own ? static_cast<unsigned>(Below(kVariants)) : 0, AnyTimeout());
}

void Worker::PagesStored(const PageStorer::Ended& ended) {
  if (ended.result == nullptr || !absl::StartsWith(ended.sequence, "own/")) return;
  for (const StoreBlockResult& block : ended.result->blocks) {
    if (block.outcome != StoreOutcome::kStored) {
      Wrong(absl::StrCat("store pages: ", ended.sequence, " existed before it was stored"));
    }
  }
  Private& own = *privates_[Below(privates_.size())];
  own.space = ended.space;
  own.name = ended.sequence;
  for (auto& block : own.allowed) block.fill(1u << ended.variant);
}

}  // namespace kvmill::stress
