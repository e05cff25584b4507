// The oracle of kernels/refine.h for one row, in doubles. Never optimized.
#ifndef KVMILL_KERNELS_REFINE_REFERENCE_H_
#define KVMILL_KERNELS_REFINE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"
#include "kernels/refine.h"

namespace kvmill {

// A row of a tile as encode has it before it rounds to fp16.
struct RefineRow {
  const float* values;  // Rotated; `columns` of them.
  const float* across;  // T.
  std::size_t columns;
  float code_max;
  float* codes;  // Whole numbers.
  float scale, zero;
};

// Moments of codes q and of what q S + Z should be, y = x / T, with weights T^2.
struct RefineMoments {
  double mean_q = 0, mean_y = 0, var_q = 0, var_y = 0, covariance = 0, square_q = 0;
};

inline RefineMoments MomentsOf(const RefineRow& row) {
  RefineMoments m;
  double w = 0;
  const auto each = [&](auto add) {
    for (std::size_t c = 0; c < row.columns; ++c) {
      const auto t = static_cast<double>(row.across[c]);
      add(t * t, static_cast<double>(row.codes[c]), static_cast<double>(row.values[c]) / t);
    }
  };
  each([&](double weight, double q, double y) {
    w += weight;
    m.mean_q += weight * q;
    m.mean_y += weight * y;
    m.square_q += weight * q * q;
  });
  m.mean_q /= w;
  m.mean_y /= w;
  m.square_q /= w;
  each([&](double weight, double q, double y) {
    m.var_q += weight / w * (q - m.mean_q) * (q - m.mean_q);
    m.var_y += weight / w * (y - m.mean_y) * (y - m.mean_y);
    m.covariance += weight / w * (y - m.mean_y) * (q - m.mean_q);
  });
  return m;
}

// The line through the means in place of S and Z; not when fp16 cannot hold it.
inline void PutLine(const RefineMoments& m, double scale, RefineRow& row) {
  const auto s = static_cast<float>(scale), z = static_cast<float>(m.mean_y - scale * m.mean_q);
  if (!(s >= kFloat16SmallestScale) || !std::isfinite(Float16ToFloat(FloatToFloat16(s))) ||
      !std::isfinite(Float16ToFloat(FloatToFloat16(z)))) {
    return;
  }
  row.scale = s;
  row.zero = z;
}

inline void FitReference(RefineRow& row) {
  const RefineMoments m = MomentsOf(row);
  if (m.var_q > static_cast<double>(kRefineVarianceMin) * m.square_q && m.covariance > 0) {
    PutLine(m, m.covariance / m.var_q, row);
  }
}

inline void RecodeReference(RefineRow& row) {
  if (!(row.scale >= kFloat16SmallestScale)) {  // fp16 has no scale for them: one code.
    std::fill_n(row.codes, row.columns, 0.0f);
    return;
  }
  for (std::size_t c = 0; c < row.columns; ++c) {
    const float steps = std::nearbyint((row.values[c] / row.across[c] - row.zero) / row.scale);
    row.codes[c] = std::min(std::max(steps, 0.0f), row.code_max);
  }
}

inline void StretchReference(RefineRow& row) {
  const RefineMoments m = MomentsOf(row);
  if (!(m.covariance > 0)) return;
  const double scale = m.var_y / m.covariance, before = static_cast<double>(row.scale),
               most = static_cast<double>(kStretchMax);
  if (scale <= most * before && most * scale >= before) PutLine(m, scale, row);
}

inline void RefineRowReference(RefineRow& row) {
  for (int fit = 0; fit < kRefineFits; ++fit) {
    FitReference(row);
    RecodeReference(row);
  }
  StretchReference(row);
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_REFINE_REFERENCE_H_
