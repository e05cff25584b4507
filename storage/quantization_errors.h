// What encoding loses: sampled tiles are decoded again as they are stored and compared with the
// values that came in, |decoded - input| / |input| (Frobenius, 0/0 = 0), K and V each.
//
// One of sample_interval tiles is a sample, counted over all namespaces. The default is a prime, so
// that layers and heads take turns whatever their number is.
#ifndef KVMILL_STORAGE_QUANTIZATION_ERRORS_H_
#define KVMILL_STORAGE_QUANTIZATION_ERRORS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/tile_format.h"
#include "storage/block_writer.h"
#include "storage/core/histogram.h"
#include "storage/core/mutex.h"
#include "storage/error_guard.h"
#include "storage/namespace_table.h"

namespace kvmill {

inline constexpr std::array<double, 15> kQuantizationErrorBounds = {
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1};
using QuantizationErrorHistogram = Histogram<kQuantizationErrorBounds.size()>;

inline constexpr std::uint32_t kErrorSampleInterval = 251;

// Thread-safe. Memory: some 400 bytes a namespace with a histogram of its own, and for each thread
// that encodes a decoded tile in fp32.
class QuantizationErrors {
 public:
  struct Options {
    std::uint32_t sample_interval = kErrorSampleInterval;  // 0: no samples.
    // So many namespaces, the first ones that are sampled, have histograms of their own; the others
    // share one.
    std::uint32_t namespaces_max = 16;
    // Hears of each sample; null: nobody does. Stays who it was at the start, and outlives this.
    ErrorGuard* guard = nullptr;
  };
  explicit QuantizationErrors(const Options& options);

  // From now on. A namespace keeps the histogram that it has, whatever `namespaces_max` becomes.
  void SetOptions(const Options& options);
  std::uint32_t namespaces_max() const {
    MutexLock lock(mu_);
    return namespaces_max_;
  }
  // So many tiles were encoded. Which of them are samples: `first`, not below `tile_count` when
  // none is, and the others at `interval` from each other.
  struct Samples {
    std::size_t first = 0;
    std::size_t interval = 1;
  };
  Samples SamplesOf(std::size_t tile_count);
  // `record` is the tile of `input`: whole blocks, in host memory. Values that are not finite (of
  // memory that somebody else writes to) are passed over.
  void Observe(const OpenedNamespace& space, const TileFormat& format, const HeadInput& input,
               const std::byte* record);

  struct NamespaceErrors {
    // Empty: the namespaces without a histogram of their own.
    std::string tenant, name;
    QuantizationErrorHistogram::Snapshot k, v;
  };
  // Those with samples, the shared one last.
  std::vector<NamespaceErrors> snapshot() const;

 private:
  struct Entry {
    std::string tenant, name;
    QuantizationErrorHistogram k{kQuantizationErrorBounds}, v{kQuantizationErrorBounds};
  };
  Entry& EntryOf(const OpenedNamespace& space);

  ErrorGuard* const guard_;
  std::atomic<std::uint32_t> sample_interval_;  // A stale value is the one of before.
  std::atomic<std::uint64_t> tiles_{0};  // Encoded so far; relaxed, each caller gets its own.
  mutable Mutex mu_;
  std::uint32_t namespaces_max_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);  // Never removed.
  // By namespace; null: not sampled yet, or the shared one.
  std::vector<Entry*> by_namespace_ ABSL_GUARDED_BY(mu_);
  Entry others_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_QUANTIZATION_ERRORS_H_
