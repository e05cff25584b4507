// A node's entry in the registry: key and value, as docs/formats.md ("Members") has them.
#ifndef KVMILL_SERVICE_CLUSTER_REGISTRATION_H_
#define KVMILL_SERVICE_CLUSTER_REGISTRATION_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/cluster/member.h"

namespace kvmill {

inline constexpr std::size_t kNameBytesMax = 64;      // Of node ids and zones.
inline constexpr std::size_t kAddressBytesMax = 300;  // HOST:PORT.
inline constexpr std::size_t kHolderBytes = 16;

struct Registration {
  Member member;
  // What only one process at a time can have: it is read from a file while its lock is held. Who
  // registers with the holder of an entry that is there knows that the entry's process has ended.
  // kHolderBytes, or empty: nobody knows.
  std::string holder;

  friend bool operator==(const Registration&, const Registration&) = default;
};

// INVALID_ARGUMENT naming the text: empty, longer than kNameBytesMax, or with other characters than
// letters, digits, '.', '-' and '_'.
absl::Status CheckName(absl::string_view what, absl::string_view name);

// "<prefix>members/"; with an id, the key of its entry.
std::string MembersPrefix(absl::string_view prefix);
std::string MemberKey(absl::string_view prefix, absl::string_view id);

// INVALID_ARGUMENT naming the field that is out of bounds.
absl::StatusOr<std::string> EncodeRegistration(const Registration& registration);

// DATA_LOSS: not an entry. UNIMPLEMENTED: one of a later version.
absl::StatusOr<Registration> DecodeRegistration(absl::string_view value);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REGISTRATION_H_
