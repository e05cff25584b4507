// watch: what happens to the blocks of a daemon, one line an event.
#include "client/cli/commands_watch.h"

#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/client_options.h"
#include "client/cli/output.h"
#include "client/cli/top_screen.h"
#include "client/events.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kWatchHelp =
    "Blocks that are here, then what happens to them, one line each, until Ctrl-C; exit code 0.\n"
    "  stored   the block is here, in this tier (with several layer groups: in all of them)\n"
    "  moved    another tier is the fastest that has it now\n"
    "  removed  it is gone; the tier is the one where it was\n"
    "  cleared  no block of the namespace is here any more\n"
    "What was printed is void at 'snapshot_begin': at the start, after a restart of the daemon, "
    "and\n"
    "when events came faster than they were read. With --json every line is a document; those "
    "with\n"
    "'sequence' say how far everything was told, for --after EPOCH:SEQUENCE of the next time.\n"
    "\n"
    "Examples:\n"
    "  kvmill watch --namespace demo\n"
    "  kvmill watch --json --no-snapshot\n";

constexpr absl::Duration kLookForSignals = absl::Milliseconds(100);

struct WatchFlags {
  std::string name, after;
  bool no_snapshot = false;
  std::uint64_t count = 0;
};

absl::StatusOr<EventPosition> ParsePosition(const std::string& text) {
  const std::size_t colon = text.find(':');
  EventPosition position;
  // 16 bytes.
  const bool is_epoch = colon == 32 && text.find_first_not_of("0123456789abcdefABCDEF") == colon;
  if (!is_epoch || !absl::SimpleAtoi(text.substr(colon + 1), &position.sequence)) {
    return UsageError(absl::StrCat("--after ", text,
                                   ": want EPOCH:SEQUENCE, 32 hexadecimal digits and a number"));
  }
  position.epoch = absl::HexStringToBytes(text.substr(0, colon));
  return position;
}

const char* NameOf(WatchedEvent::Kind kind) {
  switch (kind) {
    case WatchedEvent::Kind::kStored:
      return "stored";
    case WatchedEvent::Kind::kMoved:
      return "moved";
    case WatchedEvent::Kind::kRemoved:
      return "removed";
    case WatchedEvent::Kind::kCleared:
      return "cleared";
  }
  return "unknown";
}

Json EventJson(const WatchedEvent& event) {
  Json json = {{"event", NameOf(event.kind)}, {"namespace", event.ns->name}};
  if (event.kind == WatchedEvent::Kind::kCleared) return json;
  json["key"] = event.key.ToHex();
  if (event.kind == WatchedEvent::Kind::kStored) {
    json["parent"] = event.parent.empty() ? Json(nullptr) : Json(event.parent.ToHex());
    json["tokens"] = event.token_count;
  }
  if (event.kind == WatchedEvent::Kind::kMoved) json["from"] = TierName(event.from);
  json["tier"] = TierName(event.tier);
  return json;
}

void PrintLine(const Json& document) {
  std::cout << document.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
}

void PrintText(const WatchedEvent& event) {
  std::cout << absl::StrFormat("%-8s  ", NameOf(event.kind));
  if (event.kind == WatchedEvent::Kind::kCleared) {
    std::cout << event.ns->name << "\n";
    return;
  }
  const std::string tiers = event.kind == WatchedEvent::Kind::kMoved
                                ? absl::StrCat(TierName(event.from), " -> ", TierName(event.tier))
                                : TierName(event.tier);
  std::cout << absl::StrFormat("%-12s  %s  %s", tiers, event.key.ToHex(), event.ns->name);
  if (event.token_count > 0 && event.token_count < event.ns->block_tokens) {
    std::cout << absl::StrFormat("  tail of %d tokens", event.token_count);
  }
  std::cout << "\n";
}

// False once enough were printed.
bool PrintBatch(const EventBatch& batch, bool json, std::uint64_t count, std::uint64_t* printed) {
  if (batch.snapshot_begin) {
    json ? PrintLine({{"event", "snapshot_begin"}}) : void(std::cout << "snapshot_begin\n");
  }
  for (const WatchedEvent& event : batch.events) {
    json ? PrintLine(EventJson(event)) : PrintText(event);
    if (++*printed == count) return false;
  }
  if (batch.snapshot_end && !json) std::cout << "snapshot_end\n";
  if (json && batch.position.has_value()) {
    PrintLine({{"event", batch.snapshot_end ? "snapshot_end" : "position"},
               {"epoch", absl::BytesToHexString(batch.position->epoch)},
               {"sequence", batch.position->sequence}});
  }
  return true;
}

absl::Status Watch(const CommonFlags& common, const WatchFlags& flags) {
  EventStream::Options options;
  options.namespace_name = flags.name;
  options.snapshot = !flags.no_snapshot;
  if (!flags.after.empty()) {
    KVMILL_ASSIGN_OR_RETURN(options.after, ParsePosition(flags.after));
  }
  const TopSignals signals;  // Before the threads of the client.
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  // A daemon that is not there is said at once; one that goes away later is waited for.
  KVMILL_RETURN_IF_ERROR(client->Stat().status());
  KVMILL_ASSIGN_OR_RETURN(const Client::Options daemon, ClientOptions(common));
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<EventStream> events,
                          EventStream::Open(daemon, options));
  std::uint64_t printed = 0;
  absl::Status trouble;
  while (signals.WaitReadable({}, absl::ZeroDuration()) && !signals.ended()) {
    const absl::StatusOr<EventBatch> batch = events->Next(kLookForSignals);
    if (batch.ok()) {
      const bool more = PrintBatch(*batch, common.json, flags.count, &printed);
      std::cout << std::flush;
      if (!more) return absl::OkStatus();
      if (!std::cout.good()) {  // Who reads has seen enough: no failure.
        std::cout.clear();
        return absl::OkStatus();
      }
    } else if (!absl::IsDeadlineExceeded(batch.status())) {
      return batch.status();
    }
    const absl::Status now = events->trouble();
    if (!now.ok() && trouble.ok()) {
      std::cerr << "kvmill watch: connecting again: " << now.message() << std::endl;
    }
    trouble = now;
  }
  return absl::OkStatus();
}

}  // namespace

void AddWatchCommand(CommandLine& line) {
  auto flags = std::make_shared<WatchFlags>();
  CLI::App* app = line.Add(line.root(), "watch", "What happens to blocks, live", kWatchHelp,
                           [&line, flags] { return Watch(line.flags(), *flags); });
  app->add_option("--namespace", flags->name, "Only this namespace");
  app->add_option("--after", flags->after, "What follows this, instead of a snapshot")
      ->type_name("EPOCH:SEQUENCE");
  app->add_flag("--no-snapshot", flags->no_snapshot, "Only what happens from now on");
  app->add_option("--count", flags->count, "End after so many events (default 0: never)");
}

}  // namespace kvmill::cli
