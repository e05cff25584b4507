// Between peer.proto and service/cluster/peers.h.
//
// Requests of peers are checked here: what is out of bounds is INVALID_ARGUMENT and names value and
// limit. Of replies only what has no place in our types is refused; whoever asked checks the rest.
#ifndef KVMILL_SERVICE_PEER_CODEC_H_
#define KVMILL_SERVICE_PEER_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmill/v1/peer.pb.h"
#include "service/cluster/member.h"
#include "service/cluster/peers.h"

namespace kvmill {

inline constexpr std::size_t kIncarnationBytes = 16;

// ABORTED when a request was meant for another process than `own`.
absl::Status CheckMeantFor(absl::string_view incarnation, absl::string_view own);

void ToProto(const std::vector<RunQuery>& queries, v1::LocateRequest* out);
absl::StatusOr<std::vector<RunQuery>> FromProto(const v1::LocateRequest& request);
void ToProto(const std::vector<RunAnswer>& answers, v1::LocateReply* out);
// Empty, which is the answer to nothing (ValidAnswer), when a part of it cannot be.
std::vector<RunAnswer> FromProto(const v1::LocateReply& reply);

// With who says so.
void ToProto(const std::vector<Announcement>& announcements, const Member& holder,
             v1::AnnounceRequest* out);
absl::StatusOr<std::vector<Announcement>> FromProto(const v1::AnnounceRequest& request);
// Id and incarnation of who says so.
absl::StatusOr<Member> HolderOf(const std::string& holder, const std::string& incarnation);

absl::StatusOr<std::vector<RunList>> FromProto(const v1::ListRunsRequest& request);
absl::StatusOr<Digests> FromProto(const v1::CompareRequest& request);
void ToProto(const std::vector<HeldRun>& runs, v1::ListRunsReply* out);
// DATA_LOSS: a part of it cannot be.
absl::StatusOr<std::vector<HeldRun>> FromProto(const v1::ListRunsReply& reply);
absl::StatusOr<std::vector<std::uint8_t>> FromProto(const v1::HandOverReply& reply);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_CODEC_H_
