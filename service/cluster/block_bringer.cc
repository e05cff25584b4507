#include "service/cluster/block_bringer.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "service/cluster/anchor.h"

namespace kvmill {
namespace {

constexpr std::uint32_t Bit(std::size_t i) { return std::uint32_t{1} << i; }

std::uint32_t Covered(const std::vector<RemoteLookup::Source>& sources) {
  std::uint32_t covered = 0;
  for (const RemoteLookup::Source& source : sources) covered |= source.self ? 0 : source.blocks;
  return covered;
}

}  // namespace

BlockBringer::~BlockBringer() {
  for (const auto& [id, op] : ops_) loop_.Cancel(op.timer);
  for (auto& [id, flight] : flights_) {
    lookup_.Cancel(flight.lookup);
    fetch_.Cancel(flight.fetch);
  }
}

void BlockBringer::EndAll() {
  on_the_way_.clear();
  for (const auto& [id, flight] : std::exchange(flights_, {})) {
    lookup_.Cancel(flight.lookup);
    fetch_.Cancel(flight.fetch);
  }
  for (const auto& [id, op] : std::exchange(ops_, {})) {
    loop_.Cancel(op.timer);
    op.progress(op.request.keys.size());
  }
}

void BlockBringer::Start(Request request, Progress progress) {
  const OpId id = next_++;
  Op& op = ops_[id];
  op.parts = PartsOf(request);
  op.request = std::move(request);
  op.progress = std::move(progress);
  // Not within this call, whatever it finds.
  op.timer = loop_.After(0, [this, id] {
    Op& started = ops_.at(id);
    // Others' flights may have later deadlines.
    started.timer = loop_.At(started.request.deadline_nanos, [this, id] {
      const auto node = ops_.extract(id);
      node.mapped().progress(node.mapped().request.keys.size());
    });
    if (started.request.within != nullptr) {
      started.request.within([this, id] { StartParts(id); });
    } else {
      StartParts(id);
    }
    Report(id);
  });
}

// Missing blocks that are in one run as far as a lookup has said, or else by their position.
std::vector<BlockBringer::Part> BlockBringer::PartsOf(const Request& request) const {
  std::vector<Part> parts;
  std::size_t end = 0;  // Behind the last part, in the request's keys.
  for (std::size_t i = 0; i < request.keys.size(); ++i) {
    if (!request.missing[i]) continue;
    const SourceTable::Found known = sources_.Find(request.fingerprint, request.keys[i]);
    const std::uint64_t position = request.first_block + i;
    const std::uint64_t anchor_position = AnchorIndex(position);
    const std::size_t place =
        known.run != nullptr ? known.run->query.first + known.index : position - anchor_position;
    const BlockKey& anchor = known.run != nullptr ? known.run->query.anchor
                             : anchor_position >= request.first_block
                                 ? request.keys[anchor_position - request.first_block]
                                 : request.anchor;
    const bool joins = !parts.empty() && parts.back().query.anchor == anchor &&
                       parts.back().query.first + (i - parts.back().first) == place;
    if (!joins) {
      Part& part = parts.emplace_back();
      part.query.anchor = anchor;
      part.query.first = static_cast<std::uint8_t>(place);
      part.first = end = i;
    }
    Part& part = parts.back();
    // With those in between that are here.
    for (; end <= i; ++end) part.query.keys.push_back(request.keys[end]);
    part.missing |= Bit(i - part.first);
  }
  return parts;
}

void BlockBringer::StartParts(OpId id) {
  Op& op = ops_.at(id);
  while (op.next < op.parts.size() && op.running < kPartsAtOnce) {
    ++op.running;
    StartPart(id, op.next++);
  }
}

void BlockBringer::StartPart(OpId id, std::size_t index) {
  Op& op = ops_.at(id);
  Part& part = op.parts[index];
  std::set<FlightId> others;
  std::uint32_t own = 0;
  for (std::size_t i = 0; i < part.query.keys.size(); ++i) {
    if ((part.missing & Bit(i)) == 0) continue;
    const auto found = on_the_way_.find(AnchorHash(op.request.fingerprint, part.query.keys[i]));
    if (found == on_the_way_.end()) {
      own |= Bit(i);
    } else {
      others.insert(found->second);
    }
  }
  for (const FlightId other : others) flights_.at(other).waiting.emplace_back(id, index);
  part.flights = others.size() + (own != 0);
  if (own == 0) return;
  const FlightId flight_id = next_++;
  Flight& flight = flights_[flight_id];
  flight.fingerprint = op.request.fingerprint;
  flight.query = part.query;
  flight.missing = own;
  flight.hint = op.request.hint;
  flight.block_bytes = op.request.block_bytes;
  flight.deadline_nanos = op.request.deadline_nanos;
  flight.waiting.emplace_back(id, index);
  for (std::size_t i = 0; i < part.query.keys.size(); ++i) {
    if ((own & Bit(i)) == 0) continue;
    on_the_way_.emplace(AnchorHash(flight.fingerprint, part.query.keys[i]), flight_id);
  }
  Begin(flight_id);
}

std::vector<RemoteLookup::Source> BlockBringer::Remembered(const Flight& flight) const {
  std::vector<RemoteLookup::Source> sources;
  for (std::size_t i = 0; i < flight.query.keys.size(); ++i) {
    if ((flight.missing & Bit(i)) == 0) continue;
    const SourceTable::Found known = sources_.Find(flight.fingerprint, flight.query.keys[i]);
    if (known.run == nullptr) continue;
    for (const RemoteLookup::Source& source : known.run->sources) {
      if ((source.blocks & Bit(known.index)) == 0) continue;
      const auto same = std::find_if(sources.begin(), sources.end(), [&](const auto& other) {
        return other.member.id == source.member.id &&
               other.member.incarnation == source.member.incarnation;
      });
      if (same == sources.end()) {
        sources.push_back(source);
        sources.back().blocks = Bit(i);
      } else {
        same->blocks |= Bit(i);
      }
    }
  }
  return sources;
}

void BlockBringer::Begin(FlightId id) {
  Flight& flight = flights_.at(id);
  std::vector<RemoteLookup::Source> sources = Remembered(flight);
  if ((flight.missing & ~Covered(sources)) == 0) return Pull(id, std::move(sources));
  Look(id);
}

void BlockBringer::Look(FlightId id) {
  Flight& flight = flights_.at(id);
  flight.looked_up = true;
  RemoteLookup::Request request;
  request.fingerprint = flight.fingerprint;
  request.runs = {flight.query};
  request.hint = flight.hint;
  request.deadline_nanos =
      std::min(flight.deadline_nanos, loop_.clock().MonotonicNanos() + options_.lookup_nanos);
  flight.lookup =
      lookup_.Start(std::move(request), [this, id](std::vector<RemoteLookup::Run> runs) {
        Flight& found = flights_.at(id);
        found.lookup = 0;
        if (found.fetch == 0) return Pull(id, std::move(runs[0].sources));
        KeepNew(&found, &runs[0].sources);
        fetch_.AddSources(found.fetch, runs[0].sources);
      });
}

// Of the sources those that were not asked yet, which are from now on.
void BlockBringer::KeepNew(Flight* flight, std::vector<RemoteLookup::Source>* sources) {
  std::erase_if(*sources, [flight](RemoteLookup::Source& source) {
    source.blocks &= flight->missing;
    return source.self || source.blocks == 0 ||
           !flight->asked.emplace(source.member.id, source.member.incarnation).second;
  });
}

void BlockBringer::Pull(FlightId id, std::vector<RemoteLookup::Source> sources) {
  Flight& flight = flights_.at(id);
  KeepNew(&flight, &sources);
  if (sources.empty()) return Land(id);
  RemoteFetch::Request request;
  request.fingerprint = flight.fingerprint;
  request.anchor = flight.query.anchor;
  request.first = flight.query.first;
  request.keys = flight.query.keys;
  request.sources = std::move(sources);
  const double bytes =
      static_cast<double>(flight.block_bytes) * std::popcount(flight.missing) * kPartsAtOnce;
  request.call_nanos =
      options_.pull_nanos + static_cast<std::int64_t>(bytes * options_.nanos_per_byte);
  request.deadline_nanos = flight.deadline_nanos;
  request.stalled = [this, id] {
    if (!flights_.at(id).looked_up) Look(id);
  };
  flight.fetch = fetch_.Start(std::move(request), [this, id](std::uint32_t have) {
    Flight& landed = flights_.at(id);
    landed.fetch = 0;
    landed.missing &= ~have;
    for (std::size_t i = 0; i < landed.query.keys.size(); ++i) {
      if ((landed.missing & Bit(i)) != 0) {
        sources_.Forget(landed.fingerprint, landed.query.keys[i]);
      }
    }
    if (landed.missing != 0 && landed.lookup != 0) return;  // Which goes on with it.
    const bool in_time = loop_.clock().MonotonicNanos() < landed.deadline_nanos;
    if (landed.missing != 0 && !landed.looked_up && in_time) return Look(id);
    Land(id);
  });
}

void BlockBringer::Land(FlightId id) {
  const auto node = flights_.extract(id);
  const Flight& flight = node.mapped();
  lookup_.Cancel(flight.lookup);
  for (const BlockKey& key : flight.query.keys) {
    const auto found = on_the_way_.find(AnchorHash(flight.fingerprint, key));
    if (found != on_the_way_.end() && found->second == id) on_the_way_.erase(found);
  }
  for (const auto& [op, part] : flight.waiting) PartSettled(op, part);
}

void BlockBringer::PartSettled(OpId id, std::size_t index) {
  const auto found = ops_.find(id);
  if (found == ops_.end()) return;
  Op& op = found->second;
  Part& part = op.parts[index];
  if (--part.flights > 0) return;
  part.settled = true;
  --op.running;
  Report(id);
  if (ops_.contains(id)) StartParts(id);
}

void BlockBringer::Report(OpId id) {
  const auto found = ops_.find(id);
  if (found == ops_.end()) return;
  Op& op = found->second;
  while (op.settled < op.parts.size() && op.parts[op.settled].settled) ++op.settled;
  const bool all = op.settled == op.parts.size();
  const std::size_t keys = all ? op.request.keys.size() : op.parts[op.settled].first;
  if (!all && keys == op.reported) return;
  op.reported = keys;
  if (op.progress(keys) && !all) return;
  loop_.Cancel(op.timer);
  ops_.erase(found);
}

}  // namespace kvmill
