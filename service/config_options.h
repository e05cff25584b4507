// The option table of config.cc, for what is made of it. Internal to service/config*.cc.
#ifndef KVMILL_SERVICE_CONFIG_OPTIONS_H_
#define KVMILL_SERVICE_CONFIG_OPTIONS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "service/config.h"

namespace kvmill {

struct Option {
  OptionInfo info;  // Without default_value.
  std::function<absl::Status(absl::string_view, Config*)> set;
  std::function<std::string(const Config&)> get;
};
// In the order of --help. A row without a group is of the group of the row before.
const std::vector<Option>& Options();

// The YAML key of an option.
std::string KeyOf(absl::string_view name);
bool IsUtf8(absl::string_view text);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CONFIG_OPTIONS_H_
