// The rule for members that vanish together: it is more likely that the registry lost them than
// that they all died.
#ifndef KVMILL_SERVICE_CLUSTER_VANISHED_H_
#define KVMILL_SERVICE_CLUSTER_VANISHED_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "service/cluster/member.h"

namespace kvmill {

// Members as the registry has them, and as they are believed to be: when more than a third of them
// vanish within one window, those that vanished in it are kept for a grace, or until they are back.
// The grace is counted from the last of them, and others that vanish together later have their own.
// A third exactly is taken as it is, so of three nodes one may die. Who drained before it went does
// not count: it left.
class VanishedMembers {
 public:
  VanishedMembers(std::int64_t window_nanos, std::int64_t grace_nanos)
      : window_nanos_(window_nanos), grace_nanos_(grace_nanos) {}

  // Times never go back.
  void Present(const Member& member);
  void Gone(const std::string& id, std::int64_t now_nanos);
  // Whether that ended somebody's grace, which changes Believed.
  bool Advance(std::int64_t now_nanos);

  // By id.
  std::vector<Member> Believed() const;
  bool keeping() const;
  // When Advance changes what is believed; none: only the registry does.
  std::optional<std::int64_t> deadline_nanos() const;

 private:
  struct Lost {
    Member member;
    std::int64_t nanos = 0;
    std::optional<std::int64_t> keep_until_nanos;  // Its own: others may have vanished before.
  };

  std::int64_t window_nanos_;
  std::int64_t grace_nanos_;
  std::map<std::string, Member> present_;
  std::map<std::string, Lost> lost_;  // Within the window, or kept.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_VANISHED_H_
