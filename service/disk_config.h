// What the configuration says of the disk tier's keys.
#ifndef KVMILL_SERVICE_DISK_CONFIG_H_
#define KVMILL_SERVICE_DISK_CONFIG_H_

#include <memory>

#include "absl/status/statusor.h"
#include "service/config.h"
#include "storage/encryption_keys.h"

namespace kvmill {

// From config.disk_key_file or the environment; null: the disk tier is not encrypted. Reads the
// file. INVALID_ARGUMENT, FAILED_PRECONDITION or NOT_FOUND.
absl::StatusOr<std::shared_ptr<const EncryptionKeys>> DiskKeysOf(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DISK_CONFIG_H_
