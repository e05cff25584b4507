// What a namespace is that this node has never opened: another node that knows it says so.
//
// Asked for by its fingerprint an answer proves itself: what it describes has that fingerprint, or
// it is a lie, and others are asked. A name proves nothing. So everybody is asked, and when two
// mean different namespaces by it, it is none; and what is learned by a name binds no name here, so
// that a peer cannot take one from this node's engines. What nodes only heard a name to mean
// (service/heard_names.h) counts where no node's engines use it.
//
// Whoever asks for what is being asked already waits for the same answer; that nobody knows a
// namespace is remembered for a moment. So a namespace that nobody has costs each node one question
// to each other one in two seconds, however many calls want it. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_NAMESPACE_LEARNER_H_
#define KVMILL_SERVICE_CLUSTER_NAMESPACE_LEARNER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"
#include "storage/core/namespace.h"

namespace kvmill {

// Which namespace is meant.
struct NamespaceQuestion {
  std::string name;           // Empty: the one with the fingerprint.
  Fingerprint fingerprint{};  // Zeros with a name.
  std::string tenant = {};    // Whose; empty: the daemons' own.

  friend auto operator<=>(const NamespaceQuestion&, const NamespaceQuestion&) = default;
};

struct DescribedNamespace {
  NamespaceSpec spec;
  std::string name;    // What engines of who says so call it; empty: it does not know.
  bool heard = false;  // Asked for by a name: its engines never opened it, others' did.

  friend bool operator==(const DescribedNamespace&, const DescribedNamespace&) = default;
};

class NamespaceLearner {
 public:
  // What a peer says, of the tenant that was asked for; its spec's tenant is not looked at.
  // Nothing: it does not know it.
  using Answer = std::optional<DescribedNamespace>;
  struct Options {
    std::string self_id;
    std::string tenant;                          // The daemons' own.
    std::int64_t call_nanos = 200'000'000;       // For one peer.
    std::int64_t limit_nanos = 1'000'000'000;    // For all of them.
    std::int64_t unknown_nanos = 2'000'000'000;  // So long nobody is asked again.
    // By the rules of Peers.
    std::function<Peers::CallId(const Member& member, const NamespaceQuestion& question,
                                std::int64_t deadline_nanos, Peers::Done<Answer> done)>
        ask;
    std::function<void(Peers::CallId)> cancel;
    // What this node itself heard the name to mean. FAILED_PRECONDITION: different things.
    std::function<absl::StatusOr<NamespaceSpec>(const NamespaceQuestion& question)> heard =
        [](const NamespaceQuestion&) { return absl::NotFoundError("nothing was heard"); };
  };
  static constexpr std::size_t kQuestionsMax = 16;      // Different ones at a time,
  static constexpr std::size_t kQuestionsOfOneMax = 4;  // of them of one tenant other than our own.
  static constexpr std::size_t kWaitersMax = 1024;      // Who wait for their answers.
  static constexpr std::size_t kCallsMax = 8;           // Of one question, at a time,
  static constexpr std::size_t kAskedMax = 256;         //   and in all.
  static constexpr std::size_t kUnknownMax = 1024;      // That are remembered.
  using Done = std::function<void(absl::StatusOr<DescribedNamespace>)>;

  NamespaceLearner(Loop& loop, PeerHealth& health, Options options);
  ~NamespaceLearner();
  NamespaceLearner(const NamespaceLearner&) = delete;
  NamespaceLearner& operator=(const NamespaceLearner&) = delete;

  void SetView(std::shared_ptr<const ClusterView> view) { view_ = std::move(view); }
  // Of questions and calls from now on.
  void SetNanos(std::int64_t call_nanos, std::int64_t limit_nanos) {
    options_.call_nanos = call_nanos;
    options_.limit_nanos = limit_nanos;
  }

  // `hint`: node id of who is asked first; may be empty. `done` runs once, maybe within this call,
  // by the deadline. NOT_FOUND: nobody says in time that it knows it; FAILED_PRECONDITION naming
  // two nodes: they mean different ones by the name. RESOURCE_EXHAUSTED: too much is asked already.
  void Learn(const NamespaceQuestion& question, const std::string& hint,
             std::int64_t deadline_nanos, Done done);

  // All who wait are told what has come: when this node leaves.
  void CompleteAll();

  std::size_t questions() const { return asking_.size(); }
  std::size_t unknown() const { return unknown_.size(); }

 private:
  struct Waiter {
    Loop::TimerId timer = 0;
    Done done;
  };
  struct Asking {
    std::vector<Member> members;  // To ask, in this order.
    std::size_t next = 0;
    std::map<Peers::CallId, Member> calls;
    std::map<std::uint64_t, Waiter> waiters;
    Loop::TimerId timer = 0;
    // Of a name: what it is, and who said so first; what engines mean by it, and what was heard.
    struct Meaning {
      Answer found;
      std::string found_by;
      absl::Status differ;
    };
    Meaning known, heard;
  };
  const std::string& TenantOf(const NamespaceQuestion& question) const {
    return question.tenant.empty() ? options_.tenant : question.tenant;
  }
  // Whether there may be no more questions of this tenant.
  bool TooMany(const NamespaceQuestion& question) const;
  std::vector<Member> MembersToAsk(const NamespaceQuestion& question,
                                   const std::string& hint) const;
  void Hear(const NamespaceQuestion& question, Asking::Meaning* heard) const;
  void Ask(const NamespaceQuestion& question);
  void Answered(const NamespaceQuestion& question, Peers::CallId call,
                absl::StatusOr<Answer> answer);
  // Whether it is an answer to the question.
  bool IsTrue(const NamespaceQuestion& question, const NamespaceSpec& spec) const;
  void Complete(const NamespaceQuestion& question);
  static void Add(const NamespaceQuestion& question, DescribedNamespace said, const std::string& by,
                  Asking::Meaning* meaning);
  absl::StatusOr<DescribedNamespace> ResultOf(const NamespaceQuestion& question,
                                              const Asking& asking) const;
  void RememberUnknown(const NamespaceQuestion& question);

  Loop& loop_;
  PeerHealth& health_;
  Options options_;
  std::shared_ptr<const ClusterView> view_;
  std::map<NamespaceQuestion, Asking> asking_;
  std::map<NamespaceQuestion, std::int64_t> unknown_;  // Until when.
  std::size_t waiters_ = 0;
  std::uint64_t next_waiter_ = 1;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_NAMESPACE_LEARNER_H_
