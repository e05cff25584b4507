// The members' entries as the registry has them: listed once, then followed by a watch.
//
// A watch that breaks is resumed where it left off. What was compacted meanwhile, a server that has
// not seen what was seen here, another cluster id and a revision that fell are answered with a
// list; the last two are another history, which makes everything known before worthless. On the
// loop.
#ifndef KVMILL_SERVICE_CLUSTER_ROSTER_H_
#define KVMILL_SERVICE_CLUSTER_ROSTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "service/cluster/back_off.h"
#include "service/cluster/loop.h"
#include "service/cluster/registration.h"
#include "service/cluster/registry.h"

namespace kvmill {

class Roster {
 public:
  struct Options {
    std::string prefix;  // Of the members' keys.
    std::int64_t call_nanos = 0;
    std::int64_t silence_nanos = 0;
    std::int64_t back_off_nanos_max = 0;
    std::uint64_t seed = 0;
  };
  struct Calls {
    std::function<void(const Registry::Entry&, const Registration&)> present;  // New or changed.
    std::function<void(const std::string& id, Registry::Revision)> gone;
    // Before the differences to the other history's entries are told.
    std::function<void()> other_history;
    // After the differences. `listed`: who is not there now was not at `revision`.
    std::function<void(bool listed, Registry::Revision revision)> told;
    // Whether what is told is what the registry has; and what is wrong if not.
    std::function<void(bool following, const absl::Status& why)> following;
  };

  Roster(Loop& loop, Registry& registry, Options options, Calls calls);
  ~Roster();
  Roster(const Roster&) = delete;
  Roster& operator=(const Roster&) = delete;

  void Start() { List(); }
  // Of an answer that others got. `exact`: its revision is none of those that may be old.
  void Saw(const Registry::Header& header, bool exact);
  // What is known may be of another history.
  void ListAgain();

  bool Has(const std::string& id) const { return entries_.contains(options_.prefix + id); }
  std::uint64_t cluster_id() const { return cluster_id_; }  // 0 before the first list.
  Registry::Revision revision() const { return revision_; }

 private:
  struct Known {
    std::string id;
    Registry::Revision revision = 0;
  };

  void List();
  void Listed(const Registry::Listing& listing);
  void Watch();
  void Tell(const Registry::Entry& entry);
  void TellGone(const std::string& key, Registry::Revision revision);
  // Stops what is in progress; then `next` after a while.
  void Later(void (Roster::*next)());
  void Stop();

  Loop& loop_;
  Registry& registry_;
  const Options options_;
  const Calls calls_;
  BackOff back_off_;
  Registry::CallId call_ = 0;  // The list or the watch.
  bool listing_ = false;
  Loop::TimerId timer_ = 0;
  std::uint64_t cluster_id_ = 0;
  Registry::Revision revision_ = 0;       // Up to which everything has been told.
  std::map<std::string, Known> entries_;  // By key; those that can be read.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_ROSTER_H_
