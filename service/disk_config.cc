#include "service/disk_config.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<std::shared_ptr<const EncryptionKeys>> DiskKeysOf(const Config& config) {
  const bool from_file = !config.disk_key_file.empty();
  const std::string what = from_file ? absl::StrCat("--disk-key-file ", config.disk_key_file)
                                     : std::string("KVMILL_DISK_KEY");
  if (from_file && config.disk_keys != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the environment has KVMILL_DISK_KEY, too; want one of them"));
  }
  if (!from_file && config.disk_keys == nullptr) {
    return std::shared_ptr<const EncryptionKeys>();
  }
  if (config.data_dir.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": needs --data-dir"));
  }
  if (!from_file) return config.disk_keys;
  auto keys = EncryptionKeys::ReadFile(config.disk_key_file);
  if (keys.ok()) return keys;
  return absl::Status(keys.status().code(),
                      absl::StrCat("--disk-key-file ", keys.status().message()));
}

}  // namespace kvmill
