// The shadow model: what every page of the engine must hold, and what may be in the store.
//
// A page holds what the model computed, or what decoding the block's tile gives:
// decode(encode(K, V)) with the kernels that the daemon and the client use, so equality is of bits.
// Heads that a tile cannot hold, sink blocks and tails are raw: the exact bytes.
#ifndef KVMILL_TESTS_ENGINE_SHADOW_H_
#define KVMILL_TESTS_ENGINE_SHADOW_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "client/client.h"
#include "tests/engine/kv_memory.h"
#include "tests/engine/kv_model.h"

namespace kvmill::engine {

// One head of one layer of one block, as the store must hold it and as an engine must get it back.
struct ExpectedHead {
  SlotKind kind = SlotKind::kRaw;
  std::vector<std::byte> contents;  // Of the page's slot: the record, or K then V.
  std::vector<std::uint16_t> rows;  // [K, V][token][channel].
};

// What one sequence must have in its pages, as the scheduler sees it.
struct SequenceView {
  std::uint64_t request = 0;
  std::vector<PageId> pages;
  std::vector<std::uint64_t> hashes;   // Prefix hash of each token.
  std::vector<std::uint64_t> sources;  // Per page, as in PageTable.
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SequenceView, request, pages, hashes, sources)

class Shadow {
 public:
  explicit Shadow(const ModelShape& shape) : shape_(shape) {}

  // `hashes`: of the tokens of a block. Pages that are decoded from it can be checked from now on.
  void Remember(const std::vector<std::uint64_t>& hashes);

  // `raw`: a tail or a sink block.
  const ExpectedHead& Head(const std::vector<std::uint64_t>& hashes, bool raw, std::uint32_t layer,
                           std::uint32_t head);

  // The first `token_count` tokens of a sequence in a rank's memory. Empty, or which request,
  // token, layer, head and channel is wrong.
  std::string Check(const SequenceView& sequence, std::uint32_t token_count,
                    std::uint32_t head_begin, KvMemory& memory);

 private:
  const ModelShape shape_;
  std::map<std::uint64_t, std::vector<std::uint64_t>> blocks_;  // By their last hash.
  std::map<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, bool>, ExpectedHead> heads_;
};

// What may be in the store: blocks of which every token was computed from accepted tokens, and the
// tails of finished sequences. Lives as long as the namespace, over any number of engines and
// daemons. What is really there is less: evicted, removed, refused, lost with a daemon.
class StoreModel {
 public:
  explicit StoreModel(const ModelShape& shape) : shape_(shape), shadow_(shape) {}

  // The tokens [begin, end) of a request, all computed, are one block or a tail.
  void Allow(std::uint64_t request, const std::vector<std::uint64_t>& hashes, std::uint32_t begin,
             std::uint32_t end);

  // Fetches everything that the daemon lists and compares it bit by bit. Returns what is wrong.
  std::vector<std::string> Audit(Client& client, const ClientNamespace& ns);
  // Blocks compared by the last Audit.
  std::size_t audited_blocks() const { return audited_blocks_; }
  // Of these, tails that have as many tokens as another one behind the same parent.
  std::size_t audited_rivals() const { return audited_rivals_; }
  std::vector<BlockKey> keys() const;

 private:
  struct Block {
    std::uint64_t request = 0;
    std::uint32_t begin = 0;
    std::uint64_t parent = 0;  // Prefix hash before it; 0: none.
    bool raw = false;
    std::vector<std::uint64_t> hashes;
  };
  class Comparer;

  const ModelShape shape_;
  Shadow shadow_;
  std::map<std::string, Block> blocks_;  // By key. The first entry stays, as in the store.
  std::size_t audited_blocks_ = 0;
  std::size_t audited_rivals_ = 0;
};

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_SHADOW_H_
