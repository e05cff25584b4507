// The shadow model of the stress test: what every byte of every block must be.
//
// A sequence is a name in one of two spaces (namespaces). Its K and V are a function of tenant,
// space, name and variant, so whoever knows these knows each byte of its pages, at any time and in
// any process. Sequences that everybody stores have variant 0 only. The private ones of a thread
// have several: there the thread also knows which of them it stored first.
#ifndef KVMILL_TESTS_STRESS_STRESS_MODEL_H_
#define KVMILL_TESTS_STRESS_STRESS_MODEL_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/client.h"
#include "kernels/attention.h"

namespace kvmill::stress {

inline constexpr std::uint32_t kLayers = 2;
inline constexpr std::uint32_t kHeads = 2;
inline constexpr std::uint32_t kHeadDim = 64;
inline constexpr std::uint32_t kBlockTokens = 64;
inline constexpr std::uint32_t kWholeBlocks = 4;            // Of a sequence,
inline constexpr std::uint32_t kBlocks = kWholeBlocks + 1;  // with its tail.
inline constexpr std::uint32_t kVariants = 4;

enum class Space : std::uint8_t {
  kTiles = 0,  // Two layer groups of one layer; whole blocks become tiles.
  kRaw = 1,    // One layer group; all blocks are sinks, which stay in 16 bits.
};
inline constexpr std::size_t kSpaces = 2;

NamespaceSpec SpecOf(Space space);
const char* NameOf(Space space);
constexpr std::uint32_t GroupCount(Space space) { return space == Space::kTiles ? 2 : 1; }

// splitmix64.
inline std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::uint32_t TailTokens(const std::string& sequence);  // 1 to kBlockTokens - 1.
BlockKey TailsOwnKey(const std::string& sequence);      // As an engine names it.
// Of its whole blocks, then of its tail, as they are stored.
std::vector<BlockKey> KeysOf(const std::string& sequence);

// Thread-safe after construction.
class Model {
 public:
  // Encodes what tiles can hold: some milliseconds.
  explicit Model(uid_t tenant);

  // Which of the variants below `variants` have these bytes, as bits; 0: none, the bytes are wrong.
  unsigned Matching(Space space, const std::string& sequence, std::uint32_t block,
                    unsigned variants, const PageView& page) const;
  // Entries of AttentionSequence::blocks for the whole blocks of a sequence of Space::kTiles, from
  // memory of the model; as FillAttentionBlocks.
  std::vector<AttentionBlock> AttentionBlocksOf(const std::string& sequence, unsigned variant,
                                                std::uint32_t layer) const;

 private:
  friend class StoreInput;
  using Values = std::vector<std::uint16_t>;  // [token][head][channel]
  struct Content {
    Values k[kLayers], v[kLayers];
    std::vector<std::byte> records[kLayers][kHeads];
  };
  std::uint64_t HashOf(Space space, const std::string& sequence, std::uint32_t block,
                       unsigned variant) const;
  const Content& ContentOf(std::uint64_t hash) const { return contents_[hash % contents_.size()]; }
  static void FillRow(std::uint64_t hash, std::uint32_t layer, bool value, std::uint32_t token,
                      std::uint32_t head, std::uint16_t* row);

  const std::uint64_t tenant_;
  std::vector<Content> contents_;
};

// What one Store call sends.
class StoreInput {
 public:
  struct Heads {
    std::uint32_t begin = 0, count = kHeads;
  };
  // `not_finite`: every row of the first block begins with a NaN (Space::kRaw).
  StoreInput(const Model& model, Space space, const std::string& sequence, unsigned variant,
             Heads heads, bool not_finite = false);
  absl::Span<const StoreBlock> blocks() const { return blocks_; }

 private:
  std::vector<Model::Values> values_;
  std::vector<LayerInput> layers_;
  std::vector<StoreBlock> blocks_;
};

// Attention of made-up queries over whole blocks of one layer, without a tail.
std::vector<float> Attend(const std::vector<AttentionBlock>& blocks);

// Ends the process with code kWrongBytes and says why on standard output: the parent fails.
inline constexpr int kWrongBytes = 70;
[[noreturn]] void Wrong(const std::string& what);

}  // namespace kvmill::stress

#endif  // KVMILL_TESTS_STRESS_STRESS_MODEL_H_
