// One thread of a stress_client: random operations, and what it knows about the blocks. What it
// does is in stress_stores.cc and stress_reads.cc, the rest in stress_worker.cc.
#ifndef KVMILL_TESTS_STRESS_STRESS_WORKER_H_
#define KVMILL_TESTS_STRESS_STRESS_WORKER_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "tests/stress/stress_clients.h"
#include "tests/stress/stress_model.h"
#include "tests/stress/stress_pages.h"
#include "tests/stress/stress_tickets.h"

namespace kvmill::stress {

class Worker {
 public:
  // `number` among the workers of the process. `reuses_pages_unasked`: see PageStorer.
  Worker(const Model& model, const Clients& clients, std::uint64_t seed, std::string name,
         std::uint32_t number, bool reuses_pages_unasked);

  void Step();
  std::map<std::string, std::uint64_t> did() const;

 private:
  // What may be there of a sequence that only this thread stores: for each block and layer group
  // the variants that a reader may see. Empty: a hit is wrong. An upper bound, since eviction and
  // other threads' Clear take away what they like.
  struct Private {
    Space space = Space::kTiles;
    std::string name;
    std::array<std::array<unsigned, 2>, kBlocks> allowed{};
  };
  struct Target {
    Space space = Space::kTiles;
    std::string name;
    Private* own = nullptr;  // Null: everybody's.
    unsigned variants() const { return own == nullptr ? 1 : kVariants; }
  };
  struct Held {
    Target target;
    Private seen;  // Of a private one, what may be seen in this mapping.
    Client::MappedPtr mapped;
  };
  class Sink;

  // What everybody stores: more than fits in host memory, little enough to meet again.
  static constexpr std::uint64_t kSharedSequences[kSpaces] = {400, 300};

  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  bool OneIn(std::uint64_t n) { return Below(n) == 0; }
  Target Pick();
  std::string AnySharedName(Space space) {
    return absl::StrCat("all/", Below(kSharedSequences[static_cast<std::size_t>(space)]));
  }
  Client& AnyClient();
  // What only this thread stores stays on one node: elsewhere it would outlive its removal.
  Client& AnyClientFor(const Target& target);
  bool OnOtherNode(const Target& target);
  CallOptions AnyTimeout();
  // After a call whose outcome is not known the thread forgets the sequence and takes a new name.
  void Forget(Private* own);
  void NotePages(const Target& target, std::uint32_t block, std::uint32_t group, unsigned matching,
                 const char* how);
  void CheckFailure(const absl::Status& status, const char* how);

  void Store();
  void StoreByRanks();
  void StoreNotFinite();
  void StorePages();
  void PagesStored(const PageStorer::Ended& ended);
  void Fetch();
  void Map();
  void LookAt(Held& held);
  void AttendTo(Held& held);
  void OutlastLease(Held& held);
  void Lookup();
  void Remove();
  void RegisterMemory();
  void CutOneSocket();
  void Administer();

  const Model& model_;
  const Clients& clients_;
  std::mt19937_64 random_;
  const std::string name_;
  std::uint64_t names_ = 0;
  std::vector<std::unique_ptr<Private>> privates_;
  std::vector<Held> held_;
  std::map<std::string, std::uint64_t> did_;
  PageStorer pages_;                       // Tells the others,
  std::unique_ptr<TicketStorer> tickets_;  // and this one uses it. Null without another node.
};

}  // namespace kvmill::stress

#endif  // KVMILL_TESTS_STRESS_STRESS_WORKER_H_
