#include "service/cluster/registration.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "storage/core/quoted.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr absl::string_view kMagic = "kvmill.member/";
constexpr absl::string_view kVersion = "1";
constexpr std::size_t kIncarnationBytes = 16;

bool IsNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
}

absl::Status CheckMember(const Member& member) {
  KVMILL_RETURN_IF_ERROR(CheckName("node id", member.id));
  if (!member.zone.empty()) KVMILL_RETURN_IF_ERROR(CheckName("zone", member.zone));
  if (member.incarnation.size() != kIncarnationBytes) {
    return absl::InvalidArgumentError(absl::StrCat("incarnation of ", member.incarnation.size(),
                                                   " bytes: want ", kIncarnationBytes));
  }
  const auto printable = [](const std::string& address) {
    return address.size() <= kAddressBytesMax &&
           std::all_of(address.begin(), address.end(), [](char c) { return c > ' ' && c < 0x7f; });
  };
  if (!printable(member.admin_address)) {
    return absl::InvalidArgumentError(absl::StrCat("admin \"", absl::CEscape(member.admin_address),
                                                   "\": want at most ", kAddressBytesMax,
                                                   " printable characters without spaces"));
  }
  if (member.address.empty() || !printable(member.address)) {
    return absl::InvalidArgumentError(absl::StrCat("address \"", absl::CEscape(member.address),
                                                   "\": want 1 to ", kAddressBytesMax,
                                                   " printable characters without spaces"));
  }
  if (member.capacity_bytes == 0)
    return absl::InvalidArgumentError("capacity_bytes 0: want at least 1");
  return absl::OkStatus();
}

bool FromHex(absl::string_view hex, std::size_t bytes, std::string* to) {
  if (hex.size() != 2 * bytes) return false;
  for (const char c : hex) {
    if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f')) return false;
  }
  *to = absl::HexStringToBytes(hex);
  return true;
}

}  // namespace

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  if (name.empty() || name.size() > kNameBytesMax ||
      !std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", Quoted(name), ": want 1 to ",
                                                   kNameBytesMax,
                                                   " letters, digits, '.', '-' and '_'"));
  }
  return absl::OkStatus();
}

std::string MembersPrefix(absl::string_view prefix) { return absl::StrCat(prefix, "members/"); }
std::string MemberKey(absl::string_view prefix, absl::string_view id) {
  return absl::StrCat(MembersPrefix(prefix), id);
}

absl::StatusOr<std::string> EncodeRegistration(const Registration& registration) {
  const Member& member = registration.member;
  KVMILL_RETURN_IF_ERROR(CheckMember(member));
  if (!registration.holder.empty() && registration.holder.size() != kHolderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("holder of ", registration.holder.size(), " bytes: want 0 or ", kHolderBytes));
  }
  return absl::StrCat(
      kMagic, kVersion, " id=", member.id,
      " incarnation=", absl::BytesToHexString(member.incarnation), " address=", member.address,
      " zone=", member.zone, " capacity_bytes=", member.capacity_bytes,
      " state=", member.state == MemberState::kServing ? "serving" : "draining",
      " holder=", absl::BytesToHexString(registration.holder), " admin=", member.admin_address);
}

absl::StatusOr<Registration> DecodeRegistration(absl::string_view value) {
  const std::vector<absl::string_view> words = absl::StrSplit(value, ' ');
  if (!absl::StartsWith(words[0], kMagic)) return absl::DataLossError("not the entry of a member");
  if (words[0].substr(kMagic.size()) != kVersion) {
    return absl::UnimplementedError(absl::StrCat("an entry of version \"",
                                                 absl::CEscape(words[0].substr(kMagic.size())),
                                                 "\", this software reads ", kVersion));
  }
  std::map<absl::string_view, absl::string_view> fields;
  for (auto word = words.begin() + 1; word != words.end(); ++word) {
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(*word, absl::MaxSplits('=', 1));
    if (!absl::StrContains(*word, '=') || !fields.insert(field).second) {
      return absl::DataLossError(absl::StrCat("field \"", absl::CEscape(*word),
                                              "\" of a member's entry: want name=value, once"));
    }
  }
  Registration registration;
  Member& member = registration.member;
  member.id = std::string(fields["id"]);
  member.address = std::string(fields["address"]);
  member.zone = std::string(fields["zone"]);
  member.admin_address = std::string(fields["admin"]);
  // A state of later versions: whatever it is, it is not plain serving.
  member.state = fields["state"] == "serving" ? MemberState::kServing : MemberState::kDraining;
  const absl::string_view holder = fields["holder"];
  if (!FromHex(fields["incarnation"], kIncarnationBytes, &member.incarnation) ||
      !absl::SimpleAtoi(fields["capacity_bytes"], &member.capacity_bytes) ||
      (!holder.empty() && !FromHex(holder, kHolderBytes, &registration.holder))) {
    return absl::DataLossError("incarnation, capacity_bytes or holder of a member's entry");
  }
  const absl::Status checked = CheckMember(member);
  if (!checked.ok()) return absl::DataLossError(checked.message());
  return registration;
}

}  // namespace kvmill
