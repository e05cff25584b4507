// Prompts that go from one node to another with a ticket (client/ticket.h) while they are stored:
// whole, by ranks or from shared pages, and now and then not at all, revoked or no longer wanted.
// What came is read at the node where it was redeemed, and is what was stored.
#ifndef KVMILL_TESTS_STRESS_STRESS_TICKETS_H_
#define KVMILL_TESTS_STRESS_STRESS_TICKETS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "tests/stress/stress_model.h"

namespace kvmill::stress {

class TicketStorer {
 public:
  struct Options {
    std::uint64_t seed = 0;
    std::string name;  // Of the worker: its sequences are nobody else's.
    // Stores a sequence at `here` from shared pages. False: not now.
    std::function<bool(Space, const std::string& sequence, unsigned variant)> store_pages;
    // Of a call or a block: ends the process for what must not be.
    std::function<void(const absl::Status&, const char* how)> failed;
  };

  // Tickets go both ways between the two.
  TicketStorer(const Model& model, Client& here, Client& there, const ClientNamespace* spaces,
               Options options);
  ~TicketStorer();  // Cancels what runs.

  // Begins a ticket, or lets something happen to one that runs.
  void Step();
  const std::map<std::string, std::uint64_t>& did() const { return did_; }

 private:
  struct Running;
  struct Outcome;

  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  void Start();
  void Store(Running& running);
  void StoreHeads(Running& running, StoreInput::Heads heads);
  bool TakeOutcome(Running& running);  // False: it is not over.
  void Compare(const Running& running, const RedeemResult& result);

  const Model& model_;
  Client& here_;
  Client& there_;
  const ClientNamespace* const spaces_;
  const Options options_;
  std::mt19937_64 random_;
  std::uint64_t names_ = 0;
  std::vector<std::unique_ptr<Running>> running_;
  std::map<std::string, std::uint64_t> did_;
};

}  // namespace kvmill::stress

#endif  // KVMILL_TESTS_STRESS_STRESS_TICKETS_H_
