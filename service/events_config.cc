#include "service/events_config.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "service/callers.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// `*numeric`: whether it is an address at all.
bool IsLoopback(const std::string& host, bool* numeric) {
  in_addr ipv4;
  in6_addr ipv6;
  *numeric = true;
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return (ntohl(ipv4.s_addr) >> 24) == 127;
  if (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) return IN6_IS_ADDR_LOOPBACK(&ipv6);
  *numeric = false;
  return false;
}

}  // namespace

absl::StatusOr<HostPort> ParseEventsAddress(absl::string_view text) {
  absl::ConsumePrefix(&text, "tcp://");
  KVMILL_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(text));
  bool numeric = false;
  IsLoopback(address.host, &numeric);
  if (!numeric) {
    return absl::InvalidArgumentError(
        absl::StrCat("host \"", address.host, "\": want a numeric address"));
  }
  return address;
}

absl::Status CheckEvents(const Config& config) {
  if (config.events.empty() && !config.events_replay.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--events-replay ", config.events_replay, ": needs --events"));
  }
  for (const auto& [name, value] :
       {std::pair<const char*, const std::string&>("events", config.events),
        {"events-replay", config.events_replay}}) {
    if (value.empty()) continue;
    KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseEventsAddress(value));
    bool numeric = false;
    if (IsLoopback(address.host, &numeric) || config.insecure) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--", name, " ", value,
                     ": ZeroMQ has no TLS here, and whoever reaches it reads along: want a "
                     "loopback address, or --insecure; Events.Watch on --listen has TLS"));
  }
  return absl::OkStatus();
}

absl::StatusOr<EventPublisher::Options> MakePublisherOptions(const Config& config) {
  EventPublisher::Options options;
  options.tenant = kDefaultTenant;
  KVMILL_ASSIGN_OR_RETURN(options.address, ParseEventsAddress(config.events));
  if (!config.events_replay.empty()) {
    KVMILL_ASSIGN_OR_RETURN(options.replay, ParseEventsAddress(config.events_replay));
  }
  options.topic = config.events_topic;
  options.namespace_name = config.events_namespace;
  options.buffer_steps = config.events_buffer_steps;
  options.high_water_mark = config.events_high_water_mark;
  options.hashes = config.events_hashes == "bytes" ? WireHashes::kBytes : WireHashes::kInt;
  options.replay_topic = config.events_replay_frames == "topic";
  return options;
}

}  // namespace kvmill
