#include "storage/core/namespace.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/namespace_difference.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Canonical encoding: the magic, then every field in a fixed order. Strings are u32 length + bytes,
// numbers fixed-width little-endian. One spec has exactly one encoding.
constexpr absl::string_view kMagic = "kvmill-namespace-1";

class Writer {
 public:
  void U8(std::uint8_t v) { out_.push_back(static_cast<char>(v)); }
  void U16(std::uint16_t v) { Little(v, 2); }
  void U32(std::uint32_t v) { Little(v, 4); }
  void String(absl::string_view s) {
    U32(static_cast<std::uint32_t>(s.size()));
    out_.append(s.data(), s.size());
  }
  std::string Take() { return std::move(out_); }

 private:
  void Little(std::uint32_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) out_.push_back(static_cast<char>((v >> (8 * i)) & 0xFF));
  }
  std::string out_;
};

class Reader {
 public:
  explicit Reader(absl::string_view in) : in_(in) {}
  std::uint8_t U8() { return static_cast<std::uint8_t>(Little(1)); }
  std::uint16_t U16() { return static_cast<std::uint16_t>(Little(2)); }
  std::uint32_t U32() { return Little(4); }
  std::string String() {
    const std::uint32_t size = U32();
    if (size > in_.size()) {
      ok_ = false;
      return "";
    }
    std::string s(in_.substr(0, size));
    in_.remove_prefix(size);
    return s;
  }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && in_.empty(); }

 private:
  std::uint32_t Little(std::size_t bytes) {
    if (bytes > in_.size()) {
      ok_ = false;
      in_ = {};
      return 0;
    }
    std::uint32_t v = 0;
    for (std::size_t i = 0; i < bytes; ++i) {
      v |= std::uint32_t{static_cast<std::uint8_t>(in_[i])} << (8 * i);
    }
    in_.remove_prefix(bytes);
    return v;
  }
  absl::string_view in_;
  bool ok_ = true;
};

absl::Status CheckString(absl::string_view field, absl::string_view value) {
  if (value.size() > kNamespaceStringBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " of ", value.size(), " bytes: at most ", kNamespaceStringBytesMax));
  }
  return absl::OkStatus();
}

absl::Status ValidateGroup(const NamespaceSpec& spec, const LayerGroup& group, std::size_t index) {
  const std::string where = absl::StrCat("layer group ", index, ": ");
  switch (group.attention) {
    case AttentionKind::kFull:
      if (group.window_tokens != 0) {
        return absl::InvalidArgumentError(absl::StrCat(where, "window_tokens ", group.window_tokens,
                                                       " with full attention: want 0"));
      }
      break;
    case AttentionKind::kWindow:
      if (group.window_tokens == 0) {
        return absl::InvalidArgumentError(absl::StrCat(where, "window_tokens 0: want 1 or more"));
      }
      break;
    case AttentionKind::kLatent:
      return absl::InvalidArgumentError(
          absl::StrCat(where, "latent (MLA) attention is not supported by this version"));
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          where, "attention kind ", static_cast<int>(group.attention), ": want 0 or 1"));
  }
  if (group.layers.empty()) return absl::InvalidArgumentError(absl::StrCat(where, "no layers"));
  if (group.kv_heads == 0 || group.kv_heads > kKvHeadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "kv_heads ", group.kv_heads, ": want 1 to ", kKvHeadsMax));
  }
  absl::Status format = ValidateTileFormat(FormatOf(spec, group));
  if (!format.ok()) return absl::InvalidArgumentError(absl::StrCat(where, format.message()));
  return absl::OkStatus();
}

}  // namespace

std::string ToHex(const Fingerprint& fingerprint) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(fingerprint.data()), fingerprint.size()));
}

absl::Status ValidateNamespace(const NamespaceSpec& spec) {
  KVMILL_RETURN_IF_ERROR(CheckString("tenant", spec.tenant));
  KVMILL_RETURN_IF_ERROR(CheckString("model", spec.model));
  KVMILL_RETURN_IF_ERROR(CheckString("revision", spec.revision));
  KVMILL_RETURN_IF_ERROR(CheckString("adapter_digest", spec.adapter_digest));
  KVMILL_RETURN_IF_ERROR(CheckString("salt", spec.salt));
  KVMILL_RETURN_IF_ERROR(CheckString("hash_scheme", spec.hash_scheme));
  if (spec.source_dtype != DType::kFloat16 && spec.source_dtype != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "source_dtype ", static_cast<int>(spec.source_dtype), ": want 0 (fp16) or 1 (bf16)"));
  }
  if (spec.frame != Frame::kModel && spec.frame != Frame::kRotated) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame ", static_cast<int>(spec.frame), ": want 0 (model) or 1 (rotated)"));
  }
  if (spec.block_tokens != 64 && spec.block_tokens != 128) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_tokens ", spec.block_tokens, ": want 64 or 128"));
  }
  if (spec.groups.empty() || spec.groups.size() > kLayerGroupsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(spec.groups.size(), " layer groups: want 1 to ", kLayerGroupsMax));
  }
  std::set<std::uint16_t> layers;
  std::size_t layer_count = 0;
  for (std::size_t i = 0; i < spec.groups.size(); ++i) {
    const LayerGroup& group = spec.groups[i];
    KVMILL_RETURN_IF_ERROR(ValidateGroup(spec, group, i));
    if (!std::is_sorted(group.layers.begin(), group.layers.end())) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer group ", i, ": layers are not ascending"));
    }
    layers.insert(group.layers.begin(), group.layers.end());
    layer_count += group.layers.size();
  }
  if (layers.size() != layer_count) {
    return absl::InvalidArgumentError("a layer is named twice in the layer groups");
  }
  if (layer_count > kLayersMax) {
    return absl::InvalidArgumentError(absl::StrCat(layer_count, " layers: at most ", kLayersMax));
  }
  return absl::OkStatus();
}

std::string EncodeNamespace(const NamespaceSpec& spec) {
  Writer w;
  w.String(kMagic);
  w.String(spec.tenant);
  w.String(spec.model);
  w.String(spec.revision);
  w.String(spec.adapter_digest);
  w.String(spec.salt);
  w.String(spec.hash_scheme);
  w.U8(static_cast<std::uint8_t>(spec.source_dtype));
  w.U32(spec.block_tokens);
  w.U8(spec.key_bits);
  w.U8(spec.value_bits);
  w.U8(static_cast<std::uint8_t>(spec.frame));
  w.U32(spec.sink_blocks);
  w.U32(static_cast<std::uint32_t>(spec.groups.size()));
  for (const LayerGroup& group : spec.groups) {
    w.U8(static_cast<std::uint8_t>(group.attention));
    w.U32(group.window_tokens);
    w.U16(group.kv_heads);
    w.U16(group.head_dim);
    w.U32(static_cast<std::uint32_t>(group.layers.size()));
    for (std::uint16_t layer : group.layers) w.U16(layer);
  }
  return w.Take();
}

absl::StatusOr<NamespaceSpec> DecodeNamespace(absl::string_view bytes) {
  Reader r(bytes);
  NamespaceSpec spec;
  const bool magic = r.String() == kMagic;
  spec.tenant = r.String();
  spec.model = r.String();
  spec.revision = r.String();
  spec.adapter_digest = r.String();
  spec.salt = r.String();
  spec.hash_scheme = r.String();
  spec.source_dtype = static_cast<DType>(r.U8());
  spec.block_tokens = r.U32();
  spec.key_bits = r.U8();
  spec.value_bits = r.U8();
  spec.frame = static_cast<Frame>(r.U8());
  spec.sink_blocks = r.U32();
  const std::uint32_t group_count = r.U32();
  for (std::uint32_t i = 0; i < group_count && i < kLayerGroupsMax && r.ok(); ++i) {
    LayerGroup group;
    group.attention = static_cast<AttentionKind>(r.U8());
    group.window_tokens = r.U32();
    group.kv_heads = r.U16();
    group.head_dim = r.U16();
    const std::uint32_t layer_count = r.U32();
    for (std::uint32_t l = 0; l < layer_count && l < kLayersMax && r.ok(); ++l) {
      group.layers.push_back(r.U16());
    }
    spec.groups.push_back(std::move(group));
  }
  if (!magic || !r.done() || !ValidateNamespace(spec).ok()) {
    return absl::DataLossError(
        absl::StrCat("namespace record of ", bytes.size(), " bytes is not a valid encoding"));
  }
  return spec;
}

Fingerprint FingerprintOf(const NamespaceSpec& spec) {
  const Sha256Digest digest = Sha256(EncodeNamespace(spec));
  Fingerprint fingerprint;
  std::memcpy(fingerprint.data(), digest.data(), fingerprint.size());
  return fingerprint;
}

std::string DescribeDifference(const NamespaceSpec& got, const NamespaceSpec& want) {
  return DescribeDifference(got, want, "here", "there");
}

std::string DescribeDifference(const NamespaceSpec& got, const NamespaceSpec& want,
                               absl::string_view where_got, absl::string_view where_want) {
  const auto differ = [&](absl::string_view field, const auto& a, const auto& b) {
    return absl::StrCat(field, " is \"", a, "\" ", where_got, " and \"", b, "\" ", where_want);
  };
  if (got.tenant != want.tenant) return "tenant differs";  // Another tenant's name is not shown.
  if (got.model != want.model) return differ("model", got.model, want.model);
  if (got.revision != want.revision) return differ("revision", got.revision, want.revision);
  if (got.adapter_digest != want.adapter_digest) {
    return differ("adapter_digest", got.adapter_digest, want.adapter_digest);
  }
  if (got.salt != want.salt) return "salt differs";  // A salt is a secret.
  if (got.hash_scheme != want.hash_scheme) {
    return differ("hash_scheme", got.hash_scheme, want.hash_scheme);
  }
  if (got.source_dtype != want.source_dtype) {
    const auto name = [](DType d) { return d == DType::kFloat16 ? "fp16" : "bf16"; };
    return differ("source_dtype", name(got.source_dtype), name(want.source_dtype));
  }
  if (got.block_tokens != want.block_tokens) {
    return differ("block_tokens", got.block_tokens, want.block_tokens);
  }
  if (got.key_bits != want.key_bits) {
    return differ("key_bits", int{got.key_bits}, int{want.key_bits});
  }
  if (got.value_bits != want.value_bits) {
    return differ("value_bits", int{got.value_bits}, int{want.value_bits});
  }
  if (got.frame != want.frame) {
    const auto name = [](Frame f) { return f == Frame::kModel ? "model" : "rotated"; };
    return differ("frame", name(got.frame), name(want.frame));
  }
  if (got.sink_blocks != want.sink_blocks) {
    return differ("sink_blocks", got.sink_blocks, want.sink_blocks);
  }
  if (got.groups.size() != want.groups.size()) {
    return differ("layer groups", got.groups.size(), want.groups.size());
  }
  for (std::size_t i = 0; i < got.groups.size(); ++i) {
    const LayerGroup& a = got.groups[i];
    const LayerGroup& b = want.groups[i];
    const std::string where = absl::StrCat("layer group ", i, " ");
    if (a.attention != b.attention) {
      return differ(where + "attention", static_cast<int>(a.attention),
                    static_cast<int>(b.attention));
    }
    if (a.window_tokens != b.window_tokens) {
      return differ(where + "window_tokens", a.window_tokens, b.window_tokens);
    }
    if (a.kv_heads != b.kv_heads) return differ(where + "kv_heads", a.kv_heads, b.kv_heads);
    if (a.head_dim != b.head_dim) return differ(where + "head_dim", a.head_dim, b.head_dim);
    if (a.layers.size() != b.layers.size()) {
      return differ(where + "layers", a.layers.size(), b.layers.size());
    }
    if (a.layers != b.layers) return where + "layer numbers differ";
  }
  return "";
}

TileFormat FormatOf(const NamespaceSpec& spec, const LayerGroup& group) {
  TileFormat format;
  format.key_bits = spec.key_bits;
  format.value_bits = spec.value_bits;
  format.group = static_cast<std::uint16_t>(spec.block_tokens);
  format.head_dim = group.head_dim;
  return format;
}

}  // namespace kvmill
