#include "service/peer_codec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/cluster/registration.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::Status TooMany(absl::string_view what, std::size_t count, std::size_t count_max) {
  return absl::InvalidArgumentError(
      absl::StrCat(count, " ", what, " in one request: at most ", count_max));
}

absl::StatusOr<RunQuery> QueryFromProto(const v1::LocateRun& run) {
  RunQuery query;
  if (run.first() >= kRunBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("place ", run.first(), " in a run: it has ", kRunBlocks, " blocks"));
  }
  query.first = static_cast<std::uint8_t>(run.first());
  const std::size_t keys_max = kRunBlocks - run.first();
  const auto count = static_cast<std::size_t>(run.keys_size());
  if (count == 0 || count > keys_max) {
    return absl::InvalidArgumentError(absl::StrCat(count, " keys of a run from place ", run.first(),
                                                   " on: want 1 to ", keys_max));
  }
  KVMILL_ASSIGN_OR_RETURN(query.anchor, OptionalKeyFromBytes(run.anchor()));
  query.keys.reserve(count);
  for (const std::string& key : run.keys()) {
    KVMILL_ASSIGN_OR_RETURN(query.keys.emplace_back(), BlockKey::FromBytes(key));
  }
  return query;
}

absl::StatusOr<HeldRun> RunFromProto(const v1::HeldRun& from) {
  HeldRun run;
  run.anchor_hash = from.anchor_hash();
  KVMILL_ASSIGN_OR_RETURN(run.fingerprint, FingerprintFromBytes(from.fingerprint()));
  KVMILL_ASSIGN_OR_RETURN(run.blocks.anchor, BlockKey::FromBytes(from.anchor()));
  if (static_cast<std::size_t>(from.keys_size()) > kListKeysMax) {
    return TooMany("keys of a run", static_cast<std::size_t>(from.keys_size()), kListKeysMax);
  }
  for (const std::string& key : from.keys()) {
    KVMILL_ASSIGN_OR_RETURN(run.blocks.keys.emplace_back(), BlockKey::FromBytes(key));
  }
  for (const std::uint32_t place : from.places()) {
    if (place >= kRunBlocks) return absl::InvalidArgumentError(absl::StrCat("place ", place));
    run.blocks.places.push_back(static_cast<std::uint8_t>(place));
  }
  run.bytes = from.bytes();
  run.more = from.more();
  return run;
}

constexpr std::size_t kTagBytes = 2;

absl::Status CheckSizes(const v1::AnnounceRequest& request) {
  const int count = request.anchor_hashes_size();
  if (static_cast<std::size_t>(count) > kAnnouncementsMax) {
    return TooMany("announcements", static_cast<std::size_t>(count), kAnnouncementsMax);
  }
  const auto check = [count](absl::string_view what, int size) {
    if (size == count) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(size, " ", what, ": want one for each of ", count, " anchors"));
  };
  KVMILL_RETURN_IF_ERROR(check("counts", request.counts_size()));
  if (request.sums_size() > 0) KVMILL_RETURN_IF_ERROR(check("sums", request.sums_size()));
  if (request.blocks_size() > 0) {
    KVMILL_RETURN_IF_ERROR(check("numbers of blocks", request.blocks_size()));
  }
  for (int i = 0; i < request.blocks_size(); ++i) {
    if (request.blocks(i) >= request.counts(i) && request.blocks(i) <= kRunListMax) continue;
    return absl::InvalidArgumentError(absl::StrCat(request.blocks(i), " blocks in ",
                                                   request.counts(i), " places: want ",
                                                   request.counts(i), " to ", kRunListMax));
  }
  std::size_t places = 0;
  for (const std::uint32_t counted : request.counts()) {
    if (counted > kRunBlocks) {
      return absl::InvalidArgumentError(
          absl::StrCat("count ", counted, ": a run has ", kRunBlocks, " blocks"));
    }
    places += counted;
  }
  if (!request.tags().empty() && request.tags().size() != kTagBytes * places) {
    return absl::InvalidArgumentError(absl::StrCat(request.tags().size(), " bytes of tags: want ",
                                                   kTagBytes, " for each of ", places, " places"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckMeantFor(absl::string_view incarnation, absl::string_view own) {
  if (incarnation == own) return absl::OkStatus();
  if (incarnation.size() != kIncarnationBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("incarnation of ", incarnation.size(), " bytes: want ", kIncarnationBytes));
  }
  return absl::AbortedError(absl::StrCat("meant for incarnation ",
                                         absl::BytesToHexString(incarnation), ", this is ",
                                         absl::BytesToHexString(own)));
}

void ToProto(const std::vector<RunQuery>& queries, v1::LocateRequest* out) {
  for (const RunQuery& query : queries) {
    v1::LocateRun* run = out->add_runs();
    run->set_anchor(std::string(query.anchor.view()));
    run->set_first(query.first);
    for (const BlockKey& key : query.keys) run->add_keys(std::string(key.view()));
  }
}

absl::StatusOr<std::vector<RunQuery>> FromProto(const v1::LocateRequest& request) {
  const auto count = static_cast<std::size_t>(request.runs_size());
  if (count > kQueryRunsMax) return TooMany("runs", count, kQueryRunsMax);
  std::vector<RunQuery> queries;
  queries.reserve(count);
  for (const v1::LocateRun& run : request.runs()) {
    KVMILL_ASSIGN_OR_RETURN(queries.emplace_back(), QueryFromProto(run));
  }
  return queries;
}

void ToProto(const std::vector<RunAnswer>& answers, v1::LocateReply* out) {
  for (const RunAnswer& answer : answers) {
    v1::LocatedRun* run = out->add_runs();
    run->set_present(answer.present);
    for (const Pointer& pointer : answer.pointers) {
      v1::PeerPointer* to = run->add_pointers();
      to->set_holder(pointer.holder);
      to->set_incarnation(pointer.incarnation);
      to->set_blocks(pointer.blocks);
      to->set_perhaps(pointer.perhaps);
    }
  }
}

std::vector<RunAnswer> FromProto(const v1::LocateReply& reply) {
  std::vector<RunAnswer> answers;
  for (const v1::LocatedRun& run : reply.runs()) {
    RunAnswer& answer = answers.emplace_back();
    answer.present = run.present();
    for (const v1::PeerPointer& from : run.pointers()) {
      if (!HolderOf(from.holder(), from.incarnation()).ok()) return {};
      answer.pointers.push_back({from.holder(), from.incarnation(), from.blocks(), from.perhaps()});
    }
  }
  return answers;
}

void ToProto(const std::vector<Announcement>& announcements, const Member& holder,
             v1::AnnounceRequest* out) {
  out->set_holder(holder.id);
  out->set_holder_incarnation(holder.incarnation);
  for (const Announcement& announcement : announcements) {
    const RunSketch& sketch = announcement.sketch;
    out->add_anchor_hashes(announcement.anchor_hash);
    out->add_counts(sketch.count);
    out->add_sums(sketch.sum);
    out->add_blocks(std::min<std::uint32_t>(sketch.blocks, kRunListMax));
    for (std::size_t place = 0; place < sketch.count; ++place) {
      out->mutable_tags()->push_back(static_cast<char>(sketch.tags[place] & 0xff));
      out->mutable_tags()->push_back(static_cast<char>(sketch.tags[place] >> 8));
    }
  }
}

absl::StatusOr<std::vector<Announcement>> FromProto(const v1::AnnounceRequest& request) {
  KVMILL_RETURN_IF_ERROR(CheckSizes(request));
  std::vector<Announcement> announcements;
  announcements.reserve(static_cast<std::size_t>(request.anchor_hashes_size()));
  const std::string& tags = request.tags();
  std::size_t at = 0;
  for (int i = 0; i < request.anchor_hashes_size(); ++i) {
    Announcement& said = announcements.emplace_back();
    said.anchor_hash = request.anchor_hashes(i);
    said.sketch.count = static_cast<std::uint8_t>(request.counts(i));
    if (request.sums_size() > 0) said.sketch.sum = request.sums(i);
    said.sketch.blocks = request.blocks_size() > 0 ? request.blocks(i) : request.counts(i);
    if (tags.empty()) continue;
    for (std::size_t place = 0; place < said.sketch.count; ++place, at += kTagBytes) {
      const auto low = static_cast<std::uint8_t>(tags[at]);
      const auto high = static_cast<std::uint8_t>(tags[at + 1]);
      said.sketch.tags[place] = static_cast<std::uint16_t>(low | high << 8);
    }
  }
  return announcements;
}

absl::StatusOr<Member> HolderOf(const std::string& holder, const std::string& incarnation) {
  KVMILL_RETURN_IF_ERROR(CheckName("node id", holder));
  if (incarnation.size() != kIncarnationBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("incarnation of ", incarnation.size(), " bytes: want ", kIncarnationBytes));
  }
  return Member{.id = holder, .incarnation = incarnation};
}

void ToProto(const std::vector<HeldRun>& runs, v1::ListRunsReply* out) {
  for (const HeldRun& run : runs) {
    v1::HeldRun* to = out->add_runs();
    to->set_anchor_hash(run.anchor_hash);
    to->set_fingerprint(std::string(AsBytes(run.fingerprint)));
    to->set_anchor(std::string(run.blocks.anchor.view()));
    for (const BlockKey& key : run.blocks.keys) to->add_keys(std::string(key.view()));
    for (const std::uint8_t place : run.blocks.places) to->add_places(place);
    to->set_bytes(run.bytes);
    to->set_more(run.more);
  }
}

absl::StatusOr<std::vector<HeldRun>> FromProto(const v1::ListRunsReply& reply) {
  std::vector<HeldRun> runs;
  for (const v1::HeldRun& from : reply.runs()) {
    absl::StatusOr<HeldRun> run = RunFromProto(from);
    if (!run.ok()) return absl::DataLossError(run.status().message());
    runs.push_back(*std::move(run));
  }
  return runs;
}

absl::StatusOr<std::vector<RunList>> FromProto(const v1::ListRunsRequest& request) {
  const auto count = static_cast<std::size_t>(request.anchor_hashes_size());
  if (count > kListRunsMax) return TooMany("anchors", count, kListRunsMax);
  const int after = request.after_hashes_size();
  if (after != request.after_places_size() ||
      (after > 0 && after != request.anchor_hashes_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(after, " hashes and ", request.after_places_size(),
                     " places to begin after: want one of each for each of ", count, " anchors"));
  }
  std::vector<RunList> lists;
  lists.reserve(count);
  for (int i = 0; i < request.anchor_hashes_size(); ++i) {
    RunList& list = lists.emplace_back();
    list.anchor_hash = request.anchor_hashes(i);
    if (after == 0) continue;
    if (request.after_places(i) >= kRunBlocks) {
      return absl::InvalidArgumentError(absl::StrCat("place ", request.after_places(i),
                                                     " in a run: it has ", kRunBlocks, " blocks"));
    }
    list.after_place = static_cast<std::uint8_t>(request.after_places(i));
    list.after_hash = request.after_hashes(i);
  }
  return lists;
}

absl::StatusOr<Digests> FromProto(const v1::CompareRequest& request) {
  Digests digests = {};
  if (static_cast<std::size_t>(request.digests_size()) != digests.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.digests_size(), " digests: want ", digests.size()));
  }
  std::copy(request.digests().begin(), request.digests().end(), digests.begin());
  return digests;
}

absl::StatusOr<std::vector<std::uint8_t>> FromProto(const v1::HandOverReply& reply) {
  std::vector<std::uint8_t> counts;
  for (const std::uint32_t count : reply.counts()) {
    if (count > kRunBlocks) return absl::DataLossError(absl::StrCat("count ", count));
    counts.push_back(static_cast<std::uint8_t>(count));
  }
  return counts;
}

}  // namespace kvmill
