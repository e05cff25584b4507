// docs/configuration.md says what the code does: the text is the program's, and what stands in its
// tables is tried.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/units.h"
#include "service/config.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

std::string Document() {
  std::ifstream file(KVMILL_SOURCE_DIR "/docs/configuration.md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Row {
  std::string name, key, values, default_value, reloadable, meaning, group;
};

std::vector<Row> Rows() {
  std::vector<Row> rows;
  std::string group;
  for (const absl::string_view line : absl::StrSplit(Document(), '\n')) {
    if (absl::StartsWith(line, "## ")) group = std::string(line.substr(3));
    if (!absl::StartsWith(line, "| `--")) continue;
    std::vector<std::string> cells =
        absl::StrSplit(absl::StrReplaceAll(line, {{"\\|", "\x01"}}), '|');
    for (std::string& cell : cells) {
      cell = absl::StrReplaceAll(absl::StripAsciiWhitespace(cell), {{"\x01", "|"}});
    }
    if (cells.size() != 8) {
      ADD_FAILURE() << line;
      continue;
    }
    rows.push_back({absl::StrReplaceAll(cells[1], {{"`", ""}, {"--", ""}}),
                    absl::StrReplaceAll(cells[2], {{"`", ""}}), cells[3],
                    absl::StrReplaceAll(cells[4], {{"`", ""}}), cells[5], cells[6], group});
  }
  return rows;
}

std::vector<std::string> CodesIn(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '`');
  std::vector<std::string> codes;
  for (std::size_t i = 1; i < parts.size(); i += 2) codes.push_back(parts[i]);
  return codes;
}

bool Takes(const std::string& name, const std::string& value) {
  Config config;
  return SetOption(name, value, &config).ok();
}

// The next value that is smaller, or larger, in the option's own spelling; empty: there is none.
std::string Beyond(const OptionInfo& info, const std::string& bound, int step) {
  if (info.value_name == "SIZE") {
    const std::uint64_t bytes = *ParseBytes(bound);
    return bytes == 0 && step < 0 ? "" : absl::StrCat(bytes + static_cast<std::uint64_t>(step));
  }
  if (info.value_name == "DURATION") {
    const absl::Duration time = *ParseDuration(bound) + step * absl::Milliseconds(1);
    return time < absl::ZeroDuration() ? "" : absl::FormatDuration(time);
  }
  std::int64_t number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(bound, &number)) << info.name << " " << bound;
  return absl::StrCat(number + step);
}

TEST(ConfigReferenceTest, TheDocumentIsTheProgramsText) {
  EXPECT_EQ(Document(), ConfigReference())
      << "docs/configuration.md is old: kvmilld --print-options > docs/configuration.md";
}

TEST(ConfigReferenceTest, EveryOptionHasARowAndEveryRowAnOption) {
  std::map<std::string, Row> rows;
  for (const Row& row : Rows()) EXPECT_TRUE(rows.emplace(row.name, row).second) << row.name;
  EXPECT_EQ(rows.size(), ConfigOptions().size());
  std::set<std::string> groups;
  std::string group;
  for (const OptionInfo& info : ConfigOptions()) {
    ASSERT_TRUE(rows.contains(info.name)) << info.name;
    const Row& row = rows[info.name];
    EXPECT_EQ(row.key, absl::StrReplaceAll(info.name, {{"-", "_"}}));
    EXPECT_EQ(row.reloadable, info.reloadable ? "yes" : "no") << info.name;
    EXPECT_FALSE(info.group.empty()) << info.name;
    EXPECT_EQ(row.group, info.group) << info.name;
    if (info.group != group) {
      EXPECT_TRUE(groups.insert(info.group).second) << "twice: " << group;
    }
    group = info.group;
    if (!info.environment.empty()) {
      EXPECT_THAT(row.meaning, HasSubstr(info.environment));
    }
    if (row.default_value != "none") {
      EXPECT_TRUE(Takes(info.name, row.default_value)) << info.name;
    }
    Config defaults;
    const std::string value = GetOption(info.name, defaults);
    EXPECT_EQ(row.default_value, value.empty() ? "none" : value) << info.name;
  }
}

// By what the document says, not by what the table says.
TEST(ConfigReferenceTest, RangesAreThoseThatAreEnforced) {
  std::map<std::string, const OptionInfo*> infos;
  for (const OptionInfo& info : ConfigOptions()) infos[info.name] = &info;
  int ranges = 0, floors = 0, choices = 0;
  for (const Row& row : Rows()) {
    const OptionInfo& info = *infos.at(row.name);
    const std::vector<std::string> codes = CodesIn(row.values);
    if (absl::StrContains(row.values, "at least ")) {
      ++floors;
      const bool or_zero = absl::StrContains(row.values, "`0` or ");
      const std::string min = codes.back();
      EXPECT_TRUE(Takes(row.name, min)) << row.name << " " << min;
      EXPECT_FALSE(Takes(row.name, Beyond(info, min, -1))) << row.name << " below " << min;
      EXPECT_EQ(Takes(row.name, "0"), or_zero) << row.name;
    } else if (absl::StrContains(row.values, " to `")) {
      ++ranges;
      ASSERT_EQ(codes.size(), 3u) << row.values;
      EXPECT_TRUE(Takes(row.name, codes[1])) << row.name << " " << codes[1];
      EXPECT_TRUE(Takes(row.name, codes[2])) << row.name << " " << codes[2];
      const std::string below = Beyond(info, codes[1], -1);
      if (!below.empty()) {
        EXPECT_FALSE(Takes(row.name, below)) << row.name << " " << below;
      }
      const std::string above = Beyond(info, codes[2], 1);
      EXPECT_FALSE(Takes(row.name, above)) << row.name << " " << above;
    } else if (info.value_name != codes[0]) {
      ++choices;
      for (const std::string& code : codes) EXPECT_TRUE(Takes(row.name, code)) << row.name << code;
      EXPECT_EQ(Takes(row.name, ""), absl::StrContains(row.values, "none, ")) << row.name;
      EXPECT_FALSE(Takes(row.name, "another")) << row.name;
    } else if (info.value_name == "SIZE") {
      EXPECT_TRUE(Takes(row.name, "0")) << row.name << " has no range";
    } else {
      EXPECT_FALSE(info.value_name == "N" || info.value_name == "DURATION") << row.name;
    }
  }
  EXPECT_GE(ranges, 8);
  EXPECT_GE(floors, 3);
  EXPECT_GE(choices, 5);
}

TEST(ConfigReferenceTest, TheExampleIsAConfiguration) {
  const std::string text = Document();
  const std::size_t begin = text.find("```yaml\n");
  ASSERT_NE(begin, text.npos);
  const std::string yaml = text.substr(begin + 8, text.find("```", begin + 8) - begin - 8);
  const std::string path = absl::StrCat(::testing::TempDir(), "kvmill-example-", getpid());
  std::ofstream(path) << yaml;
  Config config;
  std::set<std::string> names;
  EXPECT_TRUE(ApplyYamlFile(path, &config, &names).ok()) << ApplyYamlFile(path, &config);
  EXPECT_GT(names.size(), 10u);
  config.socket = "/s";
  std::remove(path.c_str());
  // All of it is right but that there are no such certificates here.
  EXPECT_THAT(std::string(CheckConfig(config).message()), HasSubstr("/etc/kvmill/tls/"));
}

}  // namespace
}  // namespace kvmill
