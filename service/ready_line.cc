#include "service/ready_line.h"

#include <nlohmann/json.hpp>

#include "client/convert.h"

namespace kvmill {

std::string FormatReadyLine(const Config& config, const ReadyFacts& facts) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  };
  const nlohmann::ordered_json line = {
      {"ready", true},
      {"version", kSoftwareVersion},
      {"boot_id", facts.boot_id_hex},
      {"device", facts.device},
      {"socket", config.socket},
      {"listen", text_or_null(facts.listen)},
      {"admin", text_or_null(facts.admin)},
      {"tls", config.tls.enabled()},
      {"events", text_or_null(facts.events)},
      {"events_replay", text_or_null(facts.events_replay)},
      {"metrics", text_or_null(facts.metrics)},
      {"ucx", text_or_null(facts.ucx)},
      {"data_dir", text_or_null(config.data_dir)},
  };
  // Paths may be any bytes; JSON is UTF-8.
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace kvmill
