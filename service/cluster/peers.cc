#include "service/cluster/peers.h"

#include <algorithm>

namespace kvmill {

namespace {

std::uint32_t LowBits(std::size_t count) {
  return count >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1;
}
static_assert(kRunBlocks == 32, "a run's blocks are the bits of one word");

}  // namespace

std::uint32_t AllOf(const RunQuery& query) { return LowBits(query.keys.size()); }

std::uint32_t CoveredBy(std::uint8_t count, const RunQuery& query) {
  if (count <= query.first) return 0;
  return LowBits(std::min<std::size_t>(count - query.first, query.keys.size()));
}

bool ValidAnswer(const std::vector<RunQuery>& queries, const std::vector<RunAnswer>& answers) {
  if (answers.size() != queries.size()) return false;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if ((answers[i].present & ~AllOf(queries[i])) != 0) return false;
    if (answers[i].pointers.size() > kPointersMax) return false;
    for (const Pointer& pointer : answers[i].pointers) {
      if (pointer.count == 0 || pointer.count > kRunBlocks) return false;
    }
  }
  return true;
}

}  // namespace kvmill
