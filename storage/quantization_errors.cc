#include "storage/quantization_errors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/types/span.h"
#include "kernels/decode.h"

namespace kvmill {
namespace {

// |decoded - input| / |input| of the rows of one head; not finite when the input is not.
double ErrorOf(const HeadPages& input, const TileFormat& format, absl::Span<const float> decoded) {
  double difference = 0;
  double norm = 0;
  const float* at = decoded.data();
  for (std::uint32_t token = 0; token < format.group; ++token) {
    const std::byte* row = input.Row(token);
    for (std::uint32_t channel = 0; channel < format.head_dim; ++channel, ++at) {
      std::uint16_t bits;
      std::memcpy(&bits, row + channel * input.channel_stride_bytes, sizeof(bits));
      const double value = static_cast<double>(ToFloat(bits, input.dtype));
      const double off = static_cast<double>(*at) - value;
      difference += off * off;
      norm += value * value;
    }
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

}  // namespace

QuantizationErrors::QuantizationErrors(const Options& options)
    : guard_(options.guard),
      sample_interval_(options.sample_interval),
      namespaces_max_(options.namespaces_max) {}

void QuantizationErrors::SetOptions(const Options& options) {
  sample_interval_.store(options.sample_interval, std::memory_order_relaxed);
  MutexLock lock(mu_);
  namespaces_max_ = options.namespaces_max;
}

QuantizationErrors::Samples QuantizationErrors::SamplesOf(std::size_t tile_count) {
  const std::uint32_t interval = sample_interval_.load(std::memory_order_relaxed);
  if (interval == 0) return {tile_count, 1};
  const std::uint64_t before = tiles_.fetch_add(tile_count, std::memory_order_relaxed);
  const std::uint64_t past = before % interval;
  return {past == 0 ? 0 : interval - past, interval};
}

void QuantizationErrors::Observe(const OpenedNamespace& space, const TileFormat& format,
                                 const HeadInput& input, const std::byte* record) {
  // Kept from call to call: nothing is allocated for a sample but a thread's first.
  static thread_local std::vector<float> decoded;
  const std::size_t values = std::size_t{format.group} * format.head_dim;
  if (decoded.size() < 2 * values) decoded.resize(2 * values);
  const absl::Span<float> k = absl::MakeSpan(decoded.data(), values);
  const absl::Span<float> v = absl::MakeSpan(decoded.data() + values, values);
  DecodeTileToFloatCpu(format, space.spec.frame, record, k, v);
  const double k_error = ErrorOf(input.k, format, k);
  const double v_error = ErrorOf(input.v, format, v);
  if (!std::isfinite(k_error) || !std::isfinite(v_error)) return;
  Entry& entry = EntryOf(space);
  entry.k.Observe(k_error);
  entry.v.Observe(v_error);
  if (guard_ != nullptr) guard_->Observe(space, k_error, v_error);
}

QuantizationErrors::Entry& QuantizationErrors::EntryOf(const OpenedNamespace& space) {
  MutexLock lock(mu_);
  if (by_namespace_.size() <= space.id) by_namespace_.resize(space.id + 1);
  Entry*& known = by_namespace_[space.id];
  if (known != nullptr) return *known;
  if (entries_.size() >= namespaces_max_) return others_;
  entries_.push_back(std::make_unique<Entry>());
  known = entries_.back().get();
  known->tenant = space.spec.tenant;
  known->name = space.name;
  return *known;
}

std::vector<QuantizationErrors::NamespaceErrors> QuantizationErrors::snapshot() const {
  std::vector<NamespaceErrors> all;
  {
    MutexLock lock(mu_);
    for (const auto& entry : entries_) {
      all.push_back({entry->tenant, entry->name, entry->k.snapshot(), entry->v.snapshot()});
    }
  }
  NamespaceErrors others{"", "", others_.k.snapshot(), others_.v.snapshot()};
  const auto& counts = others.k.counts;
  if (std::any_of(counts.begin(), counts.end(), [](std::uint64_t n) { return n > 0; })) {
    all.push_back(std::move(others));
  }
  return all;
}

}  // namespace kvmill
