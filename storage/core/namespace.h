// Everything that must match before cached bytes may be reused.
//
// The fingerprint is the first 128 bits of the SHA-256 of a canonical encoding (docs/formats.md,
// with test vectors); pages carry it, so bytes of one namespace can never be taken for another's.
// Value types; functions are thread-safe.
#ifndef KVMILL_STORAGE_CORE_NAMESPACE_H_
#define KVMILL_STORAGE_CORE_NAMESPACE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "kernels/tile_format.h"

namespace kvmill {

using Fingerprint = std::array<std::byte, 16>;
std::string ToHex(const Fingerprint& fingerprint);

enum class AttentionKind : std::uint8_t {  // Values are part of the fingerprint and never change.
  kFull = 0,
  kWindow = 1,  // Sliding window of window_tokens.
  kLatent = 2,  // MLA; the number is reserved, ValidateNamespace refuses it.
};

// Layers that share geometry and rule.
struct LayerGroup {
  AttentionKind attention = AttentionKind::kFull;
  std::uint32_t window_tokens = 0;  // kWindow only, >= 1.
  std::vector<std::uint16_t>
      layers;                  // Layer numbers of the model, ascending, disjoint between groups.
  std::uint16_t kv_heads = 0;  // Of the whole model, not of one tensor-parallel rank.
  std::uint16_t head_dim = 0;  // 64, 128 or 256.

  friend bool operator==(const LayerGroup&, const LayerGroup&) = default;
};

// NamespaceSpec::sink_blocks of a namespace without tiles: every block stays raw.
inline constexpr std::uint32_t kAllBlocksRaw = 0xFFFFFFFF;

struct NamespaceSpec {
  std::string tenant;  // Set by the server from the caller's identity.
  std::string model;
  std::string revision;        // Of the weights.
  std::string adapter_digest;  // LoRA or empty.
  std::string salt;
  std::string
      hash_scheme;  // How the engine makes block keys, for example "sha256_cbor" or "kvmill-cli-1".
  DType source_dtype = DType::kFloat16;
  std::vector<LayerGroup> groups;
  std::uint32_t block_tokens = 128;  // 64 or 128: the tile group.
  std::uint8_t key_bits = 4;
  std::uint8_t value_bits = 2;
  Frame frame = Frame::kModel;    // Of what the engine hands over and gets back.
  std::uint32_t sink_blocks = 0;  // First blocks of a sequence that stay raw.

  friend bool operator==(const NamespaceSpec&, const NamespaceSpec&) = default;
};

// Limits, checked by ValidateNamespace; they bound what a request can make the daemon allocate.
inline constexpr std::size_t kNamespaceStringBytesMax = 1024;
inline constexpr std::size_t kLayerGroupsMax = 8;
inline constexpr std::size_t kLayersMax = 512;
inline constexpr std::size_t kKvHeadsMax = 256;

// OK, or INVALID_ARGUMENT naming field, value and limit.
absl::Status ValidateNamespace(const NamespaceSpec& spec);

// The canonical encoding, and back. Decode: DATA_LOSS when the bytes are not exactly one encoding.
std::string EncodeNamespace(const NamespaceSpec& spec);
absl::StatusOr<NamespaceSpec> DecodeNamespace(absl::string_view bytes);

Fingerprint FingerprintOf(const NamespaceSpec& spec);

// The first field in which two specs differ, as `field: "a", want "b"`; empty when equal. For
// refusals.
std::string DescribeDifference(const NamespaceSpec& got, const NamespaceSpec& want);

// The tile format of one layer group.
TileFormat FormatOf(const NamespaceSpec& spec, const LayerGroup& group);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_NAMESPACE_H_
