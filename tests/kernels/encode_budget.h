// How far encoders may differ from the reference: docs/formats.md, "Tolerances".
#ifndef KVMILL_TESTS_KERNELS_ENCODE_BUDGET_H_
#define KVMILL_TESTS_KERNELS_ENCODE_BUDGET_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/tile_testing.h"

namespace kvmill {

struct Tally {
  std::size_t codes = 0;
  std::size_t differing = 0;
  std::vector<double> distances;
};

// Adds one tile to the tally.
inline void Compare(const TileFormat& format, const Encoded& want, const Encoded& got,
                    Tally& tally) {
  const RecordLayout l = LayoutOf(format);
  const std::size_t half = std::size_t{format.group} * format.head_dim;
  const CodeDifferences k =
      CompareCodes(got.record.data() + l.k_codes, want.record.data() + l.k_codes, format.head_dim,
                   format.group, format.key_bits);
  const CodeDifferences v =
      CompareCodes(got.record.data() + l.v_codes, want.record.data() + l.v_codes, format.group,
                   format.head_dim, format.value_bits);
  EXPECT_LE(k.largest, 1u);
  EXPECT_LE(v.largest, 1u);
  tally.codes += 2 * half;
  tally.differing += k.count + v.count;
  const Decoded got_tile = Decode(ReferenceImplementation(), format, got.record);
  const Decoded want_tile = Decode(ReferenceImplementation(), format, want.record);
  tally.distances.push_back(RelativeError(got_tile.k, want_tile.k));
  tally.distances.push_back(RelativeError(got_tile.v, want_tile.v));
}

inline void ExpectWithinBudget(Tally& tally) {
  EXPECT_LE(static_cast<double>(tally.differing),
            std::ceil(1e-5 * static_cast<double>(tally.codes)));
  std::sort(tally.distances.begin(), tally.distances.end());
  ASSERT_FALSE(tally.distances.empty());
  EXPECT_LE(tally.distances[(tally.distances.size() - 1) * 99 / 100], 2.5e-3);
  EXPECT_LE(tally.distances.back(), 2e-2);
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_ENCODE_BUDGET_H_
