#include "service/store_config.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/page_pool.h"

namespace kvmill {
namespace {

// Of host memory, and of the GPU's, that may be under lease: stores need room, too.
constexpr double kLeasedShareMax = 0.75;
// Blocks of small models are 64 KiB; the index takes memory for those that are there only.
constexpr std::uint64_t kSmallBlockBytes = 64 << 10;

HugePages HugePagesOf(const Config& config) {
  if (config.huge_pages == "on") return HugePages::kOn;
  return config.huge_pages == "off" ? HugePages::kOff : HugePages::kAuto;
}

std::uint64_t LeasedBytesMax(std::uint64_t tier_bytes) {
  return static_cast<std::uint64_t>(kLeasedShareMax * static_cast<double>(tier_bytes));
}

}  // namespace

TieredStore::Options MakeStoreOptions(const Config& config, Device* gpu) {
  TieredStore::Options options;
  options.host_bytes = config.host_bytes;
  options.huge_pages = HugePagesOf(config);
  const std::uint64_t disk_bytes = config.data_dir.empty() ? 0 : config.disk_bytes;
  options.blocks_max = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
      (config.gpu_bytes + config.host_bytes + disk_bytes) / kSmallBlockBytes, options.blocks_max,
      std::uint64_t{1} << 26));
  // Each tenant needs an arena of its own: a small tier has several small ones.
  options.arena_bytes = std::clamp(config.host_bytes / 4 / kExtentBytes * kExtentBytes,
                                   kHostBytesMin, options.arena_bytes);
  if (config.gpu_bytes > 0) {
    options.gpu = gpu;
    options.gpu_bytes = config.gpu_bytes;
    options.gpu_arena_bytes = std::clamp(config.gpu_bytes / 4 / kExtentBytes * kExtentBytes,
                                         kGpuBytesMin, options.gpu_arena_bytes);
  }
  options.eviction_policy = config.eviction_policy;
  if (config.encode_algorithm == "refined") options.algorithm = Algorithm::kRefined;
  options.prefault_progress = [](std::uint64_t done, std::uint64_t total) {
    LogInfo(absl::StrCat("host memory: ", done >> 20, " of ", total >> 20, " MiB touched"));
  };
  return options;
}

absl::Status SetWatermarks(const Config& config, TieredStore& store) {
  KVMILL_RETURN_IF_ERROR(
      store.SetWatermarks(Tier::kHost, {config.host_high_watermark, config.host_low_watermark}));
  return store.SetWatermarks(Tier::kGpu, {config.gpu_high_watermark, config.gpu_low_watermark});
}

SessionTable::Options MakeSessionOptions(const Config& config) {
  SessionTable::Options options;
  options.leased_bytes_max = LeasedBytesMax(config.host_bytes);
  options.leased_gpu_bytes_max = LeasedBytesMax(config.gpu_bytes);
  options.resume_grace_nanos = absl::ToInt64Nanoseconds(config.session_grace);
  return options;
}

ErrorGuard::Options MakeGuardOptions(const Config& config) {
  ErrorGuard::Options options;
  options.action = config.guard_action == "fall-back" ? GuardAction::kFallBack
                   : config.guard_action == "refuse"  ? GuardAction::kRefuse
                                                      : GuardAction::kAlert;
  options.key_error_max = config.guard_key_error / 100.0;
  options.value_error_max = config.guard_value_error / 100.0;
  options.window_samples = config.guard_samples;
  return options;
}

}  // namespace kvmill
