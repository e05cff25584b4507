// One block of an engine's pages in shared memory, for benches that store from it.
#ifndef KVMILL_CLIENT_CLI_BENCH_PAGES_H_
#define KVMILL_CLIENT_CLI_BENCH_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/shared_memory.h"

namespace kvmill::cli {

// Constant once made. Every layer of the model is in the same pages.
class BenchPages {
 public:
  BenchPages() = default;  // Nothing.
  // Of one layer group: K and V of a whole block in 16 bits, [token, head, channel], in pages of 16
  // tokens; or its records when there are some.
  static absl::StatusOr<BenchPages> Create(const NamespaceSpec& spec,
                                           absl::Span<const std::uint16_t> k,
                                           absl::Span<const std::uint16_t> v,
                                           absl::Span<const std::byte> records);

  const EngineGeometry& geometry() const { return geometry_; }
  // A block in the pages; borrows them.
  PageBlock Block(const BlockKey& key, std::uint32_t token_count) const;

 private:
  SharedMemory memory_;
  EngineGeometry geometry_;
  std::vector<std::uint64_t> numbers_;
  std::vector<PageNumbers> lists_;  // Into numbers_.
};

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_BENCH_PAGES_H_
