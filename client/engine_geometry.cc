#include "client/engine_geometry.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kNoSum = std::numeric_limits<std::uint64_t>::max();

// a * b + c, kNoSum when that does not fit.
std::uint64_t MultiplyAdd(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t product = 0;
  std::uint64_t sum = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(product, c, &sum)) {
    return kNoSum;
  }
  return sum;
}

// Says whose field it is.
class Checker {
 public:
  explicit Checker(std::string whose) : whose_(std::move(whose)) {}

  template <typename Value, typename Want>
  absl::Status Bad(absl::string_view field, const Value& value, const Want& want) const {
    return absl::InvalidArgumentError(
        absl::StrCat(whose_, ": ", field, " ", value, ", want ", want));
  }
  template <typename Value, typename Want>
  absl::Status Differs(absl::string_view field, const Value& value, const Want& want) const {
    return absl::FailedPreconditionError(
        absl::StrCat(whose_, ": ", field, " ", value, ", the namespace has ", want));
  }

 private:
  const std::string whose_;
};

const char* ElementName(EngineElement element) {
  switch (element) {
    case EngineElement::kFloat16:
      return "fp16";
    case EngineElement::kBFloat16:
      return "bf16";
    case EngineElement::kRecords:
      return "records";
  }
  return "unknown";
}

absl::Status CheckPage(const Checker& c, const TileFormat& format, const EngineLayers& l) {
  if (l.page_bytes > l.page_stride_bytes) {
    return c.Bad("page_bytes", l.page_bytes,
                 absl::StrCat("at most page_stride_bytes ", l.page_stride_bytes));
  }
  if (l.element == EngineElement::kRecords) {
    if (l.page_tokens != l.block_tokens) {
      return c.Bad("page_tokens", l.page_tokens,
                   absl::StrCat(l.block_tokens, ", a whole block, for records"));
    }
    if (l.token_stride_bytes != 0) {
      return c.Bad("token_stride_bytes", l.token_stride_bytes, "0 for records");
    }
    if (l.head_stride_bytes < RecordBytes(format)) {
      return c.Bad("head_stride_bytes", l.head_stride_bytes,
                   absl::StrCat("at least a record, ", RecordBytes(format)));
    }
    const std::uint64_t end =
        MultiplyAdd(l.head_count - 1, l.head_stride_bytes, RecordBytes(format));
    if (end > l.page_bytes) {
      return c.Bad("page_bytes", l.page_bytes,
                   absl::StrCat("at least ", end, ", the end of the last record"));
    }
    return absl::OkStatus();
  }
  const std::uint64_t row_bytes = std::uint64_t{2} * l.head_dim;
  for (const auto& [name, stride] :
       {std::pair<const char*, std::uint64_t>("token_stride_bytes", l.token_stride_bytes),
        {"head_stride_bytes", l.head_stride_bytes}}) {
    if (stride < row_bytes || stride % 2 != 0) {
      return c.Bad(name, stride, absl::StrCat("an even number from ", row_bytes, " on"));
    }
  }
  // Rows must not overlap: heads within a token, or tokens within a head.
  const bool heads_inside =
      l.token_stride_bytes >= MultiplyAdd(l.head_count - 1, l.head_stride_bytes, row_bytes);
  const bool tokens_inside =
      l.head_stride_bytes >= MultiplyAdd(l.page_tokens - 1, l.token_stride_bytes, row_bytes);
  if (!heads_inside && !tokens_inside && l.head_count > 1 && l.page_tokens > 1) {
    return c.Bad(
        "token_stride_bytes", l.token_stride_bytes,
        absl::StrCat("rows that do not overlap: head_stride_bytes is ", l.head_stride_bytes));
  }
  const std::uint64_t heads_end = MultiplyAdd(l.head_count - 1, l.head_stride_bytes, row_bytes);
  const std::uint64_t end = heads_end == kNoSum
                                ? kNoSum
                                : MultiplyAdd(l.page_tokens - 1, l.token_stride_bytes, heads_end);
  if (end > l.page_bytes) {
    return c.Bad("page_bytes", l.page_bytes,
                 absl::StrCat("at least ", end, ", the end of the last value"));
  }
  return absl::OkStatus();
}

absl::Status CheckPlaces(const Checker& c, const EngineGeometry& geometry, const EngineLayers& l,
                         absl::string_view name, const std::vector<EnginePlace>& places) {
  const std::uint64_t bytes = MultiplyAdd(l.page_count - 1, l.page_stride_bytes, l.page_bytes);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const EnginePlace& place = places[i];
    if (place.region >= geometry.regions.size()) {
      return c.Bad(absl::StrCat(name, "[", i, "].region"), place.region,
                   absl::StrCat("below ", geometry.regions.size()));
    }
    if (place.offset_bytes % 2 != 0) {
      return c.Bad(absl::StrCat(name, "[", i, "].offset_bytes"), place.offset_bytes, "an even one");
    }
    const std::uint64_t end = bytes == kNoSum ? kNoSum : MultiplyAdd(1, bytes, place.offset_bytes);
    if (end > geometry.regions[place.region].bytes) {
      return c.Bad(absl::StrCat(name, "[", i, "].offset_bytes"), place.offset_bytes,
                   absl::StrCat("an end of the last page within region ", place.region, " of ",
                                geometry.regions[place.region].bytes, " bytes, it is at ", end));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const NamespaceSpec& spec, const EngineGeometry& geometry, std::size_t i) {
  const EngineLayers& l = geometry.layers[i];
  const Checker c(absl::StrCat("layers[", i, "]"));
  if (l.group >= spec.groups.size()) {
    return c.Differs("group", l.group, absl::StrCat(spec.groups.size(), " layer groups"));
  }
  const LayerGroup& group = spec.groups[l.group];
  const std::uint64_t layer_end = std::uint64_t{l.layer_begin} + l.keys.size();
  if (l.keys.empty()) return c.Bad("keys", 0, "one place a layer");
  if (layer_end > group.layers.size()) {
    return c.Differs("layer end", layer_end,
                     absl::StrCat(group.layers.size(), " in group ", l.group));
  }
  const std::size_t values = l.element == EngineElement::kRecords ? 0 : l.keys.size();
  if (l.values.size() != values) {
    return c.Bad("values", absl::StrCat(l.values.size(), " places"), values);
  }
  if (l.block_tokens != spec.block_tokens) {
    return c.Differs("block_tokens", l.block_tokens, spec.block_tokens);
  }
  if (l.head_dim != group.head_dim) return c.Differs("head_dim", l.head_dim, group.head_dim);
  const std::uint64_t head_end = std::uint64_t{l.head_begin} + l.head_count;
  if (l.head_count == 0) return c.Bad("head_count", 0, "at least 1");
  if (head_end > group.kv_heads) {
    return c.Differs("head end", head_end, absl::StrCat(group.kv_heads, " KV heads"));
  }
  const bool fp16 = spec.source_dtype == DType::kFloat16;
  if (l.element != EngineElement::kRecords && (l.element == EngineElement::kFloat16) != fp16) {
    return c.Differs("element", ElementName(l.element), fp16 ? "fp16" : "bf16");
  }
  if (l.page_tokens == 0 || spec.block_tokens % l.page_tokens != 0) {
    return c.Bad("page_tokens", l.page_tokens,
                 absl::StrCat("a divisor of block_tokens ", spec.block_tokens));
  }
  if (l.page_count == 0) return c.Bad("page_count", 0, "at least 1");
  KVMILL_RETURN_IF_ERROR(CheckPage(c, FormatOf(spec, group), l));
  KVMILL_RETURN_IF_ERROR(CheckPlaces(c, geometry, l, "keys", l.keys));
  return CheckPlaces(c, geometry, l, "values", l.values);
}

}  // namespace

EngineRegionKind KindOf(const EngineRegion& region) {
  if (region.kind != EngineRegionKind::kUnsaid) return region.kind;
  if (region.device_memory.has_value()) return EngineRegionKind::kDeviceIpc;
  return region.fd >= 0 ? EngineRegionKind::kMemfd : EngineRegionKind::kPrivate;
}

absl::Status CheckGeometry(const NamespaceSpec& spec, const EngineGeometry& geometry) {
  if (geometry.regions.empty() || geometry.regions.size() > kEngineRegionsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(geometry.regions.size(), " regions, want 1 to ", kEngineRegionsMax));
  }
  std::vector<EngineRegion> ascending = geometry.regions;
  std::sort(ascending.begin(), ascending.end(),
            [](const EngineRegion& a, const EngineRegion& b) { return a.base < b.base; });
  for (std::size_t i = 0; i < ascending.size(); ++i) {
    const EngineRegion& region = ascending[i];
    const std::uint64_t end = MultiplyAdd(1, region.base, region.bytes);
    const Checker c(absl::StrCat("region at ", region.base));
    if (region.bytes == 0) return c.Bad("bytes", 0, "at least 1");
    if (end == kNoSum) return c.Bad("bytes", region.bytes, "an end below 2^64");
    if (region.fd >= 0 && region.device_memory.has_value()) {
      return c.Bad("fd", region.fd, "none beside memory of a GPU");
    }
    const bool has_memory = region.fd >= 0 || region.device_memory.has_value();
    if (has_memory && region.kind != EngineRegionKind::kUnsaid) {
      return c.Bad("kind", static_cast<int>(region.kind), "0: its fields say what it is");
    }
    if (i + 1 < ascending.size() && end > ascending[i + 1].base) {
      return c.Bad("bytes", region.bytes,
                   absl::StrCat("an end before the next region at ", ascending[i + 1].base));
    }
  }
  if (geometry.layers.empty() || geometry.layers.size() > kEngineLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(geometry.layers.size(), " layers, want 1 to ", kEngineLayersMax));
  }
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    KVMILL_RETURN_IF_ERROR(CheckLayers(spec, geometry, i));
  }
  // A layer and head has one place.
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const EngineLayers& a = geometry.layers[i];
      const EngineLayers& b = geometry.layers[j];
      const bool apart = a.group != b.group || a.layer_begin + a.keys.size() <= b.layer_begin ||
                         b.layer_begin + b.keys.size() <= a.layer_begin ||
                         a.head_begin + a.head_count <= b.head_begin ||
                         b.head_begin + b.head_count <= a.head_begin;
      if (!apart) {
        return absl::InvalidArgumentError(
            absl::StrCat("layers[", i, "] and layers[", j, "] have the same layers and heads"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvmill
