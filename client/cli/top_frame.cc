#include "client/cli/top_frame.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/human.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kLabelWidth = 13;
constexpr std::size_t kValueWidth = 16;
constexpr std::size_t kNoteWidth = 20;
// Of a tier without its bar.
constexpr std::size_t kTierWidth = 74;
constexpr std::size_t kBootIdDigits = 8;  // Enough to see that it is another one.

// Names and messages come from elsewhere: nothing in them may move a cursor.
std::string Printable(absl::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return out;
}

std::string Padded(absl::string_view text, std::size_t width) {
  return absl::StrCat(text, std::string(width > text.size() ? width - text.size() : 0, ' '));
}

// A line of cells: the first is cut when there is no room, the others are left out.
class Row {
 public:
  Row(std::size_t width, absl::string_view first)
      : width_(width), text_(Printable(first).substr(0, width)) {}
  bool Fits(absl::string_view cell) const {
    return !full_ && text_.size() + absl::StripTrailingAsciiWhitespace(cell).size() <= width_;
  }
  Row& Add(absl::string_view cell) {
    full_ = !Fits(cell);  // A later, shorter cell would stand in the wrong place.
    if (!full_) absl::StrAppend(&text_, Printable(cell).substr(0, width_ - text_.size()));
    return *this;
  }
  TopLine Line(TopLine::Style style = TopLine::Style::kPlain) const {
    TopLine line{text_, style};
    line.text.erase(line.text.find_last_not_of(' ') + 1);
    return line;
  }

 private:
  std::size_t width_;
  std::string text_;
  bool full_ = false;
};

// "1,204", "0.5": with a decimal where it tells something.
std::string PerSecond(double rate) {
  return rate == 0 || rate >= 9.95 ? HumanCount(static_cast<std::uint64_t>(std::llround(rate)))
                                   : absl::StrFormat("%.1f", rate);
}

// As networks and disks are counted: powers of a thousand.
std::string BytesPerSecond(double rate) {
  constexpr const char* kUnits[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  std::size_t unit = 0;
  while (rate >= 999.5 && unit + 1 < std::size(kUnits)) {
    rate /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit > 0 && rate < 9.995 ? 2 : 0, rate, kUnits[unit]);
}

std::string Share(std::optional<double> fraction) {
  return fraction.has_value() ? absl::StrFormat("%.1f %%", *fraction * 100) : "-";
}

std::optional<double> Ratio(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return std::nullopt;
  return static_cast<double>(part) / static_cast<double>(whole);
}

std::string Bar(std::optional<double> fraction, std::size_t width) {
  const double part = std::clamp(fraction.value_or(0), 0.0, 1.0);
  const auto full = static_cast<std::size_t>(std::llround(part * static_cast<double>(width)));
  return absl::StrCat("[", std::string(full, '#'), std::string(width - full, '.'), "]");
}

class Frame {
 public:
  Frame(const TopView& view, std::size_t width) : view_(view), width_(width) {}

  std::vector<TopLine> Draw() {
    Title();
    Troubles();
    if (!view_.stat.has_value()) return lines_;
    Tiers();
    Blocks();
    Transfers();
    Holds();
    return lines_;
  }

 private:
  using Style = TopLine::Style;

  void Title() {
    const std::string time = absl::FormatTime("%H:%M:%S", view_.now, absl::LocalTimeZone());
    Row row(width_, absl::StrCat("kvmill top  ", time));
    if (view_.stat.has_value()) {
      row.Add(absl::StrCat("  up ", HumanSeconds(view_.stat->uptime_s)));
      row.Add(absl::StrCat("  boot ", view_.stat->boot_id.substr(0, kBootIdDigits)));
    }
    row.Add(absl::StrCat("  every ", HumanSeconds(absl::ToDoubleSeconds(view_.interval))));
    lines_.push_back(row.Line(Style::kHeading));
    lines_.push_back(Row(width_, view_.server).Line());
  }

  void Alarm(const std::string& text) { lines_.push_back(Row(width_, text).Line(Style::kAlarm)); }

  void Troubles() {
    const std::string silence = HumanSeconds(absl::ToDoubleSeconds(view_.silence));
    if (!view_.error.ok()) {
      Alarm(absl::StrCat("no answer for ", silence, ", trying again: ", view_.error.message()));
    } else if (view_.silence > view_.interval + absl::Seconds(2)) {
      Alarm(absl::StrCat("no answer for ", silence, ", waiting"));
    } else if (!view_.stat.has_value()) {
      lines_.push_back(Row(width_, "waiting for the first answer").Line());
    }
    if (!view_.previous_boot_id.empty()) {
      Alarm(absl::StrCat("the daemon was restarted; its boot before was ",
                         view_.previous_boot_id.substr(0, kBootIdDigits)));
    }
    if (!view_.stat.has_value()) return;
    if (view_.stat->draining) Alarm("the daemon drains: it takes no more stores");
    if (view_.stat->checksum_failures > 0) {
      Alarm(absl::StrCat(HumanCount(view_.stat->checksum_failures),
                         " copies were dropped because of a wrong checksum"));
    }
  }

  void Tiers() {
    Gap();
    const std::size_t bar =
        std::clamp<std::size_t>(width_ > kTierWidth ? width_ - kTierWidth : 0, 4, 30);
    for (const TierUsage& tier : view_.stat->tiers) {
      const std::optional<double> used = Ratio(tier.used_bytes, tier.capacity_bytes);
      Row row(width_, Padded(TierName(tier.tier), 5));
      row.Add(Bar(used, bar));
      row.Add(absl::StrFormat("%6s", used ? absl::StrFormat("%.0f %%", *used * 100) : "-"));
      std::string bytes = HumanBytes(tier.used_bytes);
      if (tier.capacity_bytes > 0) absl::StrAppend(&bytes, " of ", HumanBytes(tier.capacity_bytes));
      row.Add(absl::StrFormat(" %-23s", bytes));
      row.Add(absl::StrFormat(" %11s blocks", HumanCount(tier.blocks)));
      const auto* rates = view_.rates ? &view_.rates->evicted_blocks : nullptr;
      if (rates != nullptr) {
        row.Add(absl::StrFormat("  %s evicted/s", PerSecond(rates->at(tier.tier))));
      }
      lines_.push_back(row.Line());
    }
  }

  // "label  value  note  note"; notes without room go on below.
  void Line(absl::string_view label, absl::string_view value,
            const std::vector<std::string>& notes = {}) {
    Row row(width_, Padded(label, kLabelWidth));
    row.Add(Padded(value, kValueWidth));
    for (const std::string& note : notes) {
      if (!row.Fits(note)) {
        lines_.push_back(row.Line());
        row = Row(width_, std::string(kLabelWidth, ' '));
      }
      row.Add(Padded(note, kNoteWidth));
    }
    lines_.push_back(row.Line());
  }

  void Gap() { lines_.emplace_back(); }

  std::string Rate(double TopRates::*rate, absl::string_view unit) const {
    if (!view_.rates.has_value()) return "-";
    return absl::StrCat(PerSecond((*view_.rates).*rate), unit);
  }

  void Blocks() {
    Gap();
    const ServerStat& stat = *view_.stat;
    Line("lookups", Rate(&TopRates::lookups, "/s"), {Rate(&TopRates::lookup_blocks, " blocks/s")});
    std::vector<std::string> rates = {
        absl::StrCat(Share(Ratio(stat.hit_blocks, stat.lookup_blocks)), " since start")};
    for (const TierUsage& tier : stat.tiers) {
      if (tier.hit_blocks == 0) continue;
      rates.push_back(absl::StrCat(TierName(tier.tier), " ",
                                   Share(Ratio(tier.hit_blocks, stat.hit_blocks)), " of hits"));
    }
    Line("hit rate", Share(view_.rates ? view_.rates->hit_rate : std::nullopt), rates);
    Line("stored", Rate(&TopRates::stored_blocks, " blocks/s"),
         {Rate(&TopRates::existing_blocks, " existing/s"),
          Rate(&TopRates::rejected_blocks, " rejected/s")});
    Line("fetched", Rate(&TopRates::fetched_blocks, " blocks/s"),
         {Rate(&TopRates::fetch_misses, " misses/s")});
  }

  void Transfers() {
    Gap();
    const auto rate = [&](const auto& rates, const TransferUsage& t) {
      return view_.rates ? BytesPerSecond(((*view_.rates).*rates).at({t.path, t.transport})) : "-";
    };
    for (const TransferUsage& t : view_.stat->transfers) {
      // Blocks are mapped, never stored that way; engines' pages are stored from, never fetched to.
      const bool maps = t.path == "map";
      const std::string in = maps ? "" : absl::StrCat("in ", rate(&TopRates::bytes_in, t));
      const std::string out =
          absl::StrCat("out ", rate(&TopRates::bytes_out, t), maps ? " leased" : "");
      if (t.path == "pages") {
        Line(absl::StrCat(t.path, " ", t.transport), in);
      } else {
        Line(absl::StrCat(t.path, " ", t.transport), in, {out});
      }
    }
  }

  void Holds() {
    Gap();
    const ServerStat& stat = *view_.stat;
    const std::optional<double> compression =
        Ratio(stat.raw_bytes_ingested, stat.encoded_bytes_stored);
    Line("compression", compression ? HumanNumber(*compression, 2) : "-",
         {absl::StrCat(HumanBytes(stat.raw_bytes_ingested), " in"),
          absl::StrCat(HumanBytes(stat.encoded_bytes_stored), " stored")});
    Line("sessions", HumanCount(stat.sessions),
         {absl::StrCat(HumanCount(stat.leases), " leases"),
          absl::StrCat(HumanBytes(stat.leased_bytes), " leased"),
          absl::StrCat(HumanCount(stat.lease_expirations), " expired")});
    Line("unwritten", absl::StrCat(HumanCount(stat.unwritten_blocks), " blocks"));
    Line("metadata", HumanBytes(stat.metadata_bytes));
  }

  const TopView& view_;
  const std::size_t width_;
  std::vector<TopLine> lines_;
};

}  // namespace

std::vector<TopLine> DrawTop(const TopView& view, std::size_t width) {
  return Frame(view, width).Draw();
}

}  // namespace kvmill::cli
