// Stores from a worker's own pages in shared memory (client/page_store.h): layer by layer, flushed
// and cancelled at random. As soon as pages are free they get other bytes: whoever still read them
// would store what the model does not know.
#ifndef KVMILL_TESTS_STRESS_STRESS_PAGES_H_
#define KVMILL_TESTS_STRESS_STRESS_PAGES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "client/page_store.h"
#include "client/shared_memory.h"
#include "tests/stress/stress_model.h"

namespace kvmill::stress {

class PageStorer {
 public:
  // How a store ended; null: nobody knows what is there of it.
  struct Ended {
    Space space = Space::kTiles;
    std::string sequence;
    unsigned variant = 0;
    const StoreResult* result = nullptr;
  };
  struct Options {
    std::uint64_t seed = 0;
    std::uint64_t first_request = 1;    // Of the client's requests, 2^32 are this object's.
    bool reuses_pages_unasked = false;  // A fault, to see that it is found.
    std::function<void(const Ended&)> ended;
    // Of a call or a block: ends the process for what must not be.
    std::function<void(const absl::Status&, const char* how)> failed;
  };

  PageStorer(const Model& model, Client& client, const ClientNamespace* spaces, Options options);
  ~PageStorer();  // Cancels what runs.

  // False: there are no free pages, or too many stores.
  bool Start(Space space, const std::string& sequence, unsigned variant, CallOptions call);
  // Lets something happen to what runs.
  void Step();
  const std::map<std::string, std::uint64_t>& did() const { return did_; }

 private:
  struct Running;
  struct Outcome;

  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  std::byte* PageAt(std::uint32_t layer, bool value, std::uint64_t page) const;
  bool Register(Space space);
  void FillLayer(const Running& running, std::uint32_t layer);
  void Free(Running& running);
  // Flushes or cancels until the pages are free.
  void Withdraw(Running& running);
  bool TakeOutcome(Running& running);  // False: it is not over.

  const Model& model_;
  Client& client_;
  const ClientNamespace* const spaces_;
  const Options options_;
  std::mt19937_64 random_;
  std::uint64_t next_request_;
  SharedMemory memory_;
  std::optional<std::uint64_t> registrations_[kSpaces];
  std::vector<std::uint64_t> free_pages_;
  std::vector<std::unique_ptr<Running>> running_;
  std::map<std::string, std::uint64_t> did_;
};

}  // namespace kvmill::stress

#endif  // KVMILL_TESTS_STRESS_STRESS_PAGES_H_
