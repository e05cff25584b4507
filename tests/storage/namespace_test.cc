#include "storage/core/namespace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

NamespaceSpec Minimal() {
  NamespaceSpec spec;
  spec.model = "m";
  spec.hash_scheme = "h";
  LayerGroup group;
  group.layers = {0};
  group.kv_heads = 8;
  group.head_dim = 128;
  spec.groups = {group};
  return spec;
}

NamespaceSpec Llama() {
  NamespaceSpec spec = Minimal();
  spec.tenant = "team-a";
  spec.model = "llama-3.1-8b";
  spec.revision = "0e9e39f";
  spec.hash_scheme = "sha256_cbor";
  spec.source_dtype = DType::kBFloat16;
  spec.sink_blocks = 1;
  spec.groups[0].layers.resize(32);
  std::iota(spec.groups[0].layers.begin(), spec.groups[0].layers.end(), std::uint16_t{0});
  return spec;
}

NamespaceSpec Mixed() {
  NamespaceSpec spec;
  spec.tenant = "team-b";
  spec.model = "gemma-2";
  spec.revision = "r1";
  spec.adapter_digest = "lora:12";
  spec.salt = "pepper";
  spec.hash_scheme = "kvmill-cli-1";
  spec.source_dtype = DType::kBFloat16;
  spec.block_tokens = 64;
  spec.key_bits = 2;
  spec.value_bits = 4;
  spec.frame = Frame::kRotated;
  LayerGroup window;
  window.attention = AttentionKind::kWindow;
  window.window_tokens = 4096;
  window.layers = {0, 2, 4};
  window.kv_heads = 4;
  window.head_dim = 256;
  LayerGroup full;
  full.layers = {1, 3, 5};
  full.kv_heads = 4;
  full.head_dim = 256;
  spec.groups = {window, full};
  return spec;
}

// Every change of one field that leaves the spec valid.
std::map<std::string, std::function<void(NamespaceSpec&)>> Changes() {
  return {
      {"tenant", [](NamespaceSpec& s) { s.tenant += "x"; }},
      {"model", [](NamespaceSpec& s) { s.model += "x"; }},
      {"revision", [](NamespaceSpec& s) { s.revision += "x"; }},
      {"adapter_digest", [](NamespaceSpec& s) { s.adapter_digest += "x"; }},
      {"salt", [](NamespaceSpec& s) { s.salt += "x"; }},
      {"hash_scheme", [](NamespaceSpec& s) { s.hash_scheme += "x"; }},
      {"source_dtype", [](NamespaceSpec& s) { s.source_dtype = DType::kFloat16; }},
      {"block_tokens", [](NamespaceSpec& s) { s.block_tokens = 128; }},
      {"key_bits", [](NamespaceSpec& s) { s.key_bits = 4; }},
      {"value_bits", [](NamespaceSpec& s) { s.value_bits = 2; }},
      {"frame", [](NamespaceSpec& s) { s.frame = Frame::kModel; }},
      {"sink_blocks", [](NamespaceSpec& s) { s.sink_blocks = 2; }},
      {"layer groups", [](NamespaceSpec& s) { s.groups.pop_back(); }},
      {"layer group 0 attention",
       [](NamespaceSpec& s) {
         s.groups[0].attention = AttentionKind::kFull;
         s.groups[0].window_tokens = 0;
       }},
      {"layer group 0 window_tokens", [](NamespaceSpec& s) { s.groups[0].window_tokens = 4097; }},
      {"layer group 1 kv_heads", [](NamespaceSpec& s) { s.groups[1].kv_heads = 5; }},
      {"layer group 1 head_dim", [](NamespaceSpec& s) { s.groups[1].head_dim = 128; }},
      {"layer group 1 layers", [](NamespaceSpec& s) { s.groups[1].layers.push_back(6); }},
      {"layer group 1 layer numbers", [](NamespaceSpec& s) { s.groups[1].layers.back() = 6; }},
  };
}

// Computed from the documented encoding (docs/formats.md) by an independent program, SHA-256 from
// another library.
TEST(NamespaceTest, FingerprintsAreThePinnedOnes) {
  EXPECT_EQ(ToHex(FingerprintOf(Minimal())), "df938b9790beb8fccb0cfb1c02669400");
  EXPECT_EQ(EncodeNamespace(Minimal()).size(), 79u);
  EXPECT_EQ(ToHex(FingerprintOf(Llama())), "6973f090a756955b1684ab424dfae94d");
  EXPECT_EQ(EncodeNamespace(Llama()).size(), 175u);
  EXPECT_EQ(ToHex(FingerprintOf(Mixed())), "b9f2767d446e129dd7f277b82b9c956e");
  EXPECT_EQ(EncodeNamespace(Mixed()).size(), 140u);
}

TEST(NamespaceTest, EveryFieldChangesTheFingerprintAndIsNamedInTheDifference) {
  const NamespaceSpec base = Mixed();
  EXPECT_EQ(DescribeDifference(base, base), "");
  for (const auto& [field, change] : Changes()) {
    NamespaceSpec changed = base;
    change(changed);
    ASSERT_TRUE(ValidateNamespace(changed).ok()) << field << ValidateNamespace(changed);
    EXPECT_NE(FingerprintOf(changed), FingerprintOf(base)) << field;
    EXPECT_FALSE(changed == base) << field;
    EXPECT_THAT(DescribeDifference(changed, base), HasSubstr(field));
  }
}

TEST(NamespaceTest, MovingBytesBetweenFieldsChangesTheFingerprint) {
  NamespaceSpec a = Minimal();
  a.model = "ab";
  a.revision = "c";
  NamespaceSpec b = Minimal();
  b.model = "a";
  b.revision = "bc";
  EXPECT_NE(FingerprintOf(a), FingerprintOf(b));
}

TEST(NamespaceTest, DifferenceShowsNoSecrets) {
  NamespaceSpec changed = Mixed();
  changed.salt = "hush";
  EXPECT_EQ(DescribeDifference(changed, Mixed()), "salt differs");
  changed = Mixed();
  changed.tenant = "rival";
  EXPECT_EQ(DescribeDifference(changed, Mixed()), "tenant differs");
  changed = Mixed();
  changed.revision = "r2";
  EXPECT_EQ(DescribeDifference(changed, Mixed()), "revision is \"r2\" here and \"r1\" there");
}

TEST(NamespaceTest, RefusesBadSpecsNamingFieldAndValue) {
  const struct {
    const char* message;
    std::function<void(NamespaceSpec&)> change;
  } cases[] = {
      {"tenant of 1025 bytes: at most 1024",
       [](NamespaceSpec& s) { s.tenant = std::string(1025, 't'); }},
      {"model of 1025", [](NamespaceSpec& s) { s.model = std::string(1025, 't'); }},
      {"revision of 1025", [](NamespaceSpec& s) { s.revision = std::string(1025, 't'); }},
      {"adapter_digest of 1025",
       [](NamespaceSpec& s) { s.adapter_digest = std::string(1025, 't'); }},
      {"salt of 1025", [](NamespaceSpec& s) { s.salt = std::string(1025, 't'); }},
      {"hash_scheme of 1025", [](NamespaceSpec& s) { s.hash_scheme = std::string(1025, 't'); }},
      {"source_dtype 2", [](NamespaceSpec& s) { s.source_dtype = static_cast<DType>(2); }},
      {"frame 2", [](NamespaceSpec& s) { s.frame = static_cast<Frame>(2); }},
      {"block_tokens 0", [](NamespaceSpec& s) { s.block_tokens = 0; }},
      {"block_tokens 65600", [](NamespaceSpec& s) { s.block_tokens = 65600; }},
      {"key_bits 5", [](NamespaceSpec& s) { s.key_bits = 5; }},
      {"value_bits 8", [](NamespaceSpec& s) { s.value_bits = 8; }},
      {"0 layer groups: want 1 to 8", [](NamespaceSpec& s) { s.groups.clear(); }},
      {"9 layer groups", [](NamespaceSpec& s) { s.groups.resize(9, s.groups[0]); }},
      {"layer group 0: window_tokens 5 with full attention: want 0",
       [](NamespaceSpec& s) { s.groups[0].window_tokens = 5; }},
      {"window_tokens 0: want 1 or more",
       [](NamespaceSpec& s) { s.groups[0].attention = AttentionKind::kWindow; }},
      {"latent", [](NamespaceSpec& s) { s.groups[0].attention = AttentionKind::kLatent; }},
      {"attention kind 9",
       [](NamespaceSpec& s) { s.groups[0].attention = static_cast<AttentionKind>(9); }},
      {"no layers", [](NamespaceSpec& s) { s.groups[0].layers.clear(); }},
      {"kv_heads 0", [](NamespaceSpec& s) { s.groups[0].kv_heads = 0; }},
      {"kv_heads 257", [](NamespaceSpec& s) { s.groups[0].kv_heads = 257; }},
      {"head_dim 96", [](NamespaceSpec& s) { s.groups[0].head_dim = 96; }},
      {"not ascending",
       [](NamespaceSpec& s) {
         s.groups[0].layers = {1, 0};
       }},
      {"named twice",
       [](NamespaceSpec& s) {
         s.groups[0].layers = {1, 1};
       }},
      {"named twice", [](NamespaceSpec& s) { s.groups.push_back(s.groups[0]); }},
      {"513 layers: at most 512",
       [](NamespaceSpec& s) {
         s.groups[0].layers.resize(513);
         std::iota(s.groups[0].layers.begin(), s.groups[0].layers.end(), std::uint16_t{0});
       }},
  };
  for (const auto& c : cases) {
    NamespaceSpec spec = Minimal();
    c.change(spec);
    const absl::Status status = ValidateNamespace(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
  for (const NamespaceSpec& spec : {Minimal(), Llama(), Mixed()}) {
    EXPECT_TRUE(ValidateNamespace(spec).ok());
  }
}

TEST(NamespaceTest, EncodingGoesThereAndBack) {
  for (const NamespaceSpec& spec : {Minimal(), Llama(), Mixed()}) {
    const auto decoded = DecodeNamespace(EncodeNamespace(spec));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, spec);
  }
}

TEST(NamespaceTest, TruncatedAndExtendedEncodingsAreDataLoss) {
  const std::string encoded = EncodeNamespace(Mixed());
  for (std::size_t size = 0; size < encoded.size(); ++size) {
    EXPECT_EQ(DecodeNamespace(encoded.substr(0, size)).status().code(), absl::StatusCode::kDataLoss)
        << size;
  }
  EXPECT_EQ(DecodeNamespace(encoded + '\0').status().code(), absl::StatusCode::kDataLoss);
}

// Whatever the bytes: an error, or a spec whose one encoding they are.
TEST(NamespaceTest, DecodeTakesAnyBytes) {
  std::mt19937_64 random(20261129);
  const std::string good[] = {EncodeNamespace(Minimal()), EncodeNamespace(Llama()),
                              EncodeNamespace(Mixed())};
  int accepted = 0;
  for (int round = 0; round < ShortOrLong(20000, 1'000'000); ++round) {
    std::string bytes = good[random() % 3];
    if (round % 4 == 0) {
      for (char& c : bytes) c = static_cast<char>(random());
    } else {
      for (std::uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
    }
    const auto decoded = DecodeNamespace(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(EncodeNamespace(*decoded), bytes);
      ++accepted;
    } else {
      EXPECT_EQ(decoded.status().code(), absl::StatusCode::kDataLoss);
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(NamespaceTest, FormatIsThatOfTheGroup) {
  const NamespaceSpec spec = Mixed();
  const TileFormat format = FormatOf(spec, spec.groups[0]);
  EXPECT_EQ(ToString(format), "k2v4_g64");
  EXPECT_EQ(format.head_dim, 256);
}

}  // namespace
}  // namespace kvmill
