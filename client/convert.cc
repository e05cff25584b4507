#include "client/convert.h"

#include <cstring>
#include <limits>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr char kRetryAfterPayload[] = "kvmill.v1/retry_after_ms";

template <typename T>
absl::Status Narrow(absl::string_view field, std::uint32_t value, T* out) {
  if (value > std::numeric_limits<T>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " ", value, ": at most ", std::numeric_limits<T>::max()));
  }
  *out = static_cast<T>(value);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckProtocolVersion(std::uint32_t theirs) {
  if (theirs + 1 >= kProtocolVersion && theirs <= kProtocolVersion + 1) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("protocol version ", theirs,
                                                    " cannot talk to version ", kProtocolVersion,
                                                    ": they may differ by one"));
}

void ToProto(const NamespaceSpec& spec, v1::NamespaceSpec* out) {
  out->Clear();
  out->set_model(spec.model);
  out->set_revision(spec.revision);
  out->set_adapter_digest(spec.adapter_digest);
  out->set_salt(spec.salt);
  out->set_hash_scheme(spec.hash_scheme);
  out->set_source_dtype(static_cast<v1::DType>(static_cast<int>(spec.source_dtype) + 1));
  for (const LayerGroup& group : spec.groups) {
    v1::LayerGroup* g = out->add_groups();
    g->set_attention(static_cast<v1::Attention>(static_cast<int>(group.attention) + 1));
    g->set_window_tokens(group.window_tokens);
    for (std::uint16_t layer : group.layers) g->add_layers(layer);
    g->set_kv_heads(group.kv_heads);
    g->set_head_dim(group.head_dim);
  }
  out->set_block_tokens(spec.block_tokens);
  out->set_key_bits(spec.key_bits);
  out->set_value_bits(spec.value_bits);
  out->set_frame(static_cast<v1::Frame>(static_cast<int>(spec.frame) + 1));
  out->set_sink_blocks(spec.sink_blocks);
}

absl::StatusOr<NamespaceSpec> FromProto(const v1::NamespaceSpec& spec) {
  NamespaceSpec out;
  out.model = spec.model();
  out.revision = spec.revision();
  out.adapter_digest = spec.adapter_digest();
  out.salt = spec.salt();
  out.hash_scheme = spec.hash_scheme();
  switch (spec.source_dtype()) {
    case v1::DTYPE_FLOAT16:
      out.source_dtype = DType::kFloat16;
      break;
    case v1::DTYPE_BFLOAT16:
      out.source_dtype = DType::kBFloat16;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("source_dtype ", spec.source_dtype(), ": want 1 (fp16) or 2 (bf16)"));
  }
  switch (spec.frame()) {
    case v1::FRAME_MODEL:
      out.frame = Frame::kModel;
      break;
    case v1::FRAME_ROTATED:
      out.frame = Frame::kRotated;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("frame ", spec.frame(), ": want 1 (model) or 2 (rotated)"));
  }
  if (static_cast<std::size_t>(spec.groups_size()) > kLayerGroupsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(spec.groups_size(), " layer groups: want 1 to ", kLayerGroupsMax));
  }
  for (const v1::LayerGroup& group : spec.groups()) {
    LayerGroup& g = out.groups.emplace_back();
    switch (group.attention()) {
      case v1::ATTENTION_FULL:
        g.attention = AttentionKind::kFull;
        break;
      case v1::ATTENTION_WINDOW:
        g.attention = AttentionKind::kWindow;
        break;
      case v1::ATTENTION_LATENT:
        g.attention = AttentionKind::kLatent;
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("attention ", group.attention(), ": want 1 (full) or 2 (window)"));
    }
    g.window_tokens = group.window_tokens();
    if (static_cast<std::size_t>(group.layers_size()) > kLayersMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(group.layers_size(), " layers: at most ", kLayersMax));
    }
    for (std::uint32_t layer : group.layers()) {
      KVMILL_RETURN_IF_ERROR(Narrow("layer", layer, &g.layers.emplace_back()));
    }
    KVMILL_RETURN_IF_ERROR(Narrow("kv_heads", group.kv_heads(), &g.kv_heads));
    KVMILL_RETURN_IF_ERROR(Narrow("head_dim", group.head_dim(), &g.head_dim));
  }
  out.block_tokens = spec.block_tokens();
  KVMILL_RETURN_IF_ERROR(Narrow("key_bits", spec.key_bits(), &out.key_bits));
  KVMILL_RETURN_IF_ERROR(Narrow("value_bits", spec.value_bits(), &out.value_bits));
  out.sink_blocks = spec.sink_blocks();
  return out;
}

void ToProto(const EngineGeometry& geometry, v1::EngineGeometry* out) {
  out->Clear();
  for (const EngineRegion& region : geometry.regions) {
    v1::EngineRegion* r = out->add_regions();
    r->set_base(region.base);
    r->set_bytes(region.bytes);
    r->set_kind(static_cast<v1::EngineRegionKind>(KindOf(region)));
  }
  for (const EngineLayers& layers : geometry.layers) {
    v1::EngineLayers* l = out->add_layers();
    l->set_group(layers.group);
    l->set_layer_begin(layers.layer_begin);
    l->set_element(static_cast<v1::EngineElement>(static_cast<int>(layers.element) + 1));
    l->set_block_tokens(layers.block_tokens);
    l->set_head_dim(layers.head_dim);
    l->set_head_begin(layers.head_begin);
    l->set_head_count(layers.head_count);
    l->set_page_tokens(layers.page_tokens);
    l->set_page_count(layers.page_count);
    l->set_page_bytes(layers.page_bytes);
    l->set_page_stride_bytes(layers.page_stride_bytes);
    l->set_token_stride_bytes(layers.token_stride_bytes);
    l->set_head_stride_bytes(layers.head_stride_bytes);
    const auto add = [](const std::vector<EnginePlace>& from, auto* to) {
      for (const EnginePlace& place : from) {
        v1::EnginePlace* p = to->Add();
        p->set_region(place.region);
        p->set_offset_bytes(place.offset_bytes);
      }
    };
    add(layers.keys, l->mutable_keys());
    add(layers.values, l->mutable_values());
  }
  out->set_assembling_boot_id(geometry.assembling_boot_id);
}

absl::StatusOr<EngineGeometry> FromProto(const v1::EngineGeometry& geometry) {
  EngineGeometry out;
  for (const v1::EngineRegion& region : geometry.regions()) {
    EngineRegion& r = out.regions.emplace_back();
    r.base = region.base();
    r.bytes = region.bytes();
    if (region.kind() < v1::ENGINE_REGION_UNSPECIFIED ||
        region.kind() > v1::ENGINE_REGION_DEVICE_IPC) {
      return absl::InvalidArgumentError(
          absl::StrCat("regions[", out.regions.size() - 1, "]: kind ", region.kind(),
                       ", this daemon knows 1 (private), 2 (memfd) and 3 (device_ipc)"));
    }
    r.kind = static_cast<EngineRegionKind>(region.kind());
  }
  for (const v1::EngineLayers& layers : geometry.layers()) {
    EngineLayers& l = out.layers.emplace_back();
    l.group = layers.group();
    l.layer_begin = layers.layer_begin();
    if (layers.element() < v1::ENGINE_ELEMENT_FLOAT16 ||
        layers.element() > v1::ENGINE_ELEMENT_RECORDS) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layers[", out.layers.size() - 1, "]: element ", static_cast<int>(layers.element()),
          ", want 1 (fp16), 2 (bf16) or 3 (records)"));
    }
    l.element = static_cast<EngineElement>(static_cast<int>(layers.element()) - 1);
    l.block_tokens = layers.block_tokens();
    l.head_dim = layers.head_dim();
    l.head_begin = layers.head_begin();
    l.head_count = layers.head_count();
    l.page_tokens = layers.page_tokens();
    l.page_count = layers.page_count();
    l.page_bytes = layers.page_bytes();
    l.page_stride_bytes = layers.page_stride_bytes();
    l.token_stride_bytes = layers.token_stride_bytes();
    l.head_stride_bytes = layers.head_stride_bytes();
    for (const v1::EnginePlace& p : layers.keys()) l.keys.push_back({p.region(), p.offset_bytes()});
    for (const v1::EnginePlace& p : layers.values()) {
      l.values.push_back({p.region(), p.offset_bytes()});
    }
  }
  out.assembling_boot_id = geometry.assembling_boot_id();
  return out;
}

v1::Tier ToProto(Tier tier) { return static_cast<v1::Tier>(static_cast<int>(tier) + 1); }

absl::StatusOr<Tier> FromProto(v1::Tier tier) {
  if (tier < v1::TIER_GPU || tier > v1::TIER_PEER) {
    return absl::InvalidArgumentError(absl::StrCat("tier ", tier, ": want 1 (gpu) to 4 (peer)"));
  }
  return static_cast<Tier>(static_cast<int>(tier) - 1);
}

v1::PageMemory ToProto(PageMemory memory) {
  return static_cast<v1::PageMemory>(static_cast<int>(memory));
}

absl::StatusOr<PageMemory> FromProto(v1::PageMemory memory) {
  if (memory < v1::PAGE_MEMORY_HOST || memory > v1::PAGE_MEMORY_GPU) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory ", memory, ": want 0 (host), 1 (in place) or 2 (gpu)"));
  }
  return static_cast<PageMemory>(static_cast<int>(memory));
}

void ToProto(const Elsewhere& elsewhere, v1::Elsewhere* out) {
  out->set_local_only(elsewhere.local_only);
  out->set_hint(elsewhere.hint);
  out->set_first_block(elsewhere.first_block);
  out->set_anchor(std::string(elsewhere.anchor.view()));
}

absl::StatusOr<Elsewhere> FromProto(const v1::Elsewhere& elsewhere) {
  Elsewhere result;
  result.local_only = elsewhere.local_only();
  result.hint = elsewhere.hint();
  result.first_block = elsewhere.first_block();
  KVMILL_ASSIGN_OR_RETURN(result.anchor, OptionalKeyFromBytes(elsewhere.anchor()));
  KVMILL_RETURN_IF_ERROR(CheckElsewhere(result));
  return result;
}

absl::StatusOr<Fingerprint> FingerprintFromBytes(absl::string_view bytes) {
  Fingerprint fingerprint{};
  if (bytes.size() != fingerprint.size()) {
    return absl::InvalidArgumentError(absl::StrCat("namespace fingerprint of ", bytes.size(),
                                                   " bytes: want ", fingerprint.size()));
  }
  std::memcpy(fingerprint.data(), bytes.data(), bytes.size());
  return fingerprint;
}

absl::StatusOr<BlockKey> OptionalKeyFromBytes(absl::string_view bytes) {
  if (bytes.empty()) return BlockKey();
  return BlockKey::FromBytes(bytes);
}

absl::Duration RetryAfter(const absl::Status& status) {
  std::uint32_t retry_after_ms = 0;
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryAfterPayload);
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &retry_after_ms)) {
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(retry_after_ms);
}

void ToProto(const absl::Status& status, v1::BlockStatus* out) {
  out->set_code(static_cast<int>(status.code()));
  if (status.ok()) return;
  out->set_message(std::string(status.message()));
  if (absl::IsResourceExhausted(status)) out->set_retry_after_ms(kRetryAfterMs);
}

absl::Status FromProto(const v1::BlockStatus& status) {
  // absl's codes are the google.rpc ones; a code that this build does not know becomes UNKNOWN.
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  if (!result.ok() && status.retry_after_ms() > 0) {
    result.SetPayload(kRetryAfterPayload, absl::Cord(absl::StrCat(status.retry_after_ms())));
  }
  return result;
}

}  // namespace kvmill
