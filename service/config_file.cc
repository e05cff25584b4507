// The configuration file: YAML, strictly.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "service/config.h"
#include "service/config_options.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// The length of the UTF-8 character that `text` begins with; 0: it begins with none.
std::size_t Utf8Bytes(absl::string_view text) {
  const auto byte = [text](std::size_t i) -> std::uint32_t {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const std::uint32_t first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC2 ? 2 : 0;
  if (bytes == 0 || first > 0xF4) return 0;
  std::uint32_t code = first & (0x7Fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3F);
  }
  constexpr std::uint32_t kFirstOf[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  return code < kFirstOf[bytes] || code > 0x10FFFF || surrogate ? 0 : bytes;
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = Utf8Bytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string KeyOf(absl::string_view name) { return absl::StrReplaceAll(name, {{"-", "_"}}); }

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) {  // Opens, and reads as if it were empty.
    return absl::NotFoundError(absl::StrCat(path, ": is a directory, want a file"));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  const int error = errno;
  if (!file) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read",
                                            error == 0 ? "" : absl::StrCat(": ", strerror(error))));
  }
  std::string text(kConfigFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kConfigFileBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is larger than ", kConfigFileBytesMax, " bytes"));
  }
  int line = 1;
  for (absl::string_view rest = text; !rest.empty();) {
    const std::size_t bytes = Utf8Bytes(rest);
    const auto first = static_cast<unsigned char>(rest[0]);
    if (bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s:%d: byte 0x%02x is not UTF-8", path, line, first));
    }
    if (first == '\n') ++line;
    if (absl::ascii_iscntrl(first) && !absl::ascii_isspace(first)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s:%d: control character 0x%02x", path, line, first));
    }
    rest.remove_prefix(bytes);
  }
  return text;
}

absl::Status ApplyYamlFile(const std::string& path, Config* config, std::set<std::string>* names) {
  KVMILL_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
  const auto at = [&](const YAML::Mark& mark, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ":", mark.line + 1, ": ", what));
  };
  // yaml-cpp takes the end of a file for the end of a quoted value when only white space comes
  // after the last character, and fails when that is the last one. No option's value ends in white
  // space.
  const std::string yaml(absl::StripTrailingAsciiWhitespace(text));
  // yaml-cpp throws; nothing of it leaves this function.
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(yaml);
    if (documents.size() > 1) return at(documents[1].Mark(), "a second document: want one");
    if (documents.empty() || documents[0].IsNull()) return absl::OkStatus();
    const YAML::Node& root = documents[0];
    if (!root.IsMap()) return at(root.Mark(), "want a map of options");
    std::set<std::string> seen;
    for (const auto& entry : root) {
      const YAML::Mark mark = entry.first.Mark();
      if (!entry.first.IsScalar()) return at(mark, "a key is not a scalar");
      const std::string key = entry.first.Scalar();
      const auto option = std::find_if(Options().begin(), Options().end(),
                                       [&](const Option& o) { return KeyOf(o.info.name) == key; });
      if (option == Options().end()) return at(mark, absl::StrCat("unknown key \"", key, "\""));
      if (!seen.insert(key).second) return at(mark, absl::StrCat("key \"", key, "\" again"));
      if (!entry.second.IsScalar()) {
        return at(mark, absl::StrCat("key \"", key, "\": want a scalar"));
      }
      const absl::Status status = SetOption(option->info.name, entry.second.Scalar(), config);
      if (!status.ok()) return at(entry.second.Mark(), status.message());
      if (names != nullptr) names->insert(option->info.name);
    }
  } catch (const YAML::Exception& error) {
    if (error.msg == YAML::ErrorMsg::EOF_IN_SCALAR) {
      return at(error.mark, "the file ends inside a quoted value");
    }
    return at(error.mark, error.msg);
  }
  return absl::OkStatus();
}

std::string ToYaml(const Config& config) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  for (const Option& option : Options()) {
    out << YAML::Key << KeyOf(option.info.name) << YAML::Value << YAML::DoubleQuoted
        << option.get(config);
  }
  out << YAML::EndMap;
  return absl::StrCat(out.c_str(), "\n");
}

}  // namespace kvmill
