// Made-up K and V of every kind that has broken a quantizer.
#ifndef KVMILL_TESTS_KERNELS_TILE_INPUTS_H_
#define KVMILL_TESTS_KERNELS_TILE_INPUTS_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/tile_testing.h"

namespace kvmill {

enum class InputKind {
  kGaussian,
  kOutlierChannels,  // A few channels, 20 times as wide and off centre, as keys have.
  kHeavyTails,       // Student's t with 3 degrees of freedom.
  kConstant,         // One value everywhere.
  kConstantRows,     // Some channels and some tokens constant, the rest Gaussian.
  kZero,
  kHugeToken,    // One token 500 times as large as the others.
  kTiny,         // Deviation 1e-2: the clamp at exp(-0.3) holds everywhere.
  kNearFp16Max,  // Up to 60000.
  kLargeMean,    // Every channel has a mean of several deviations.
};

inline constexpr InputKind kInputKinds[] = {
    InputKind::kGaussian,     InputKind::kOutlierChannels,
    InputKind::kHeavyTails,   InputKind::kConstant,
    InputKind::kConstantRows, InputKind::kZero,
    InputKind::kHugeToken,    InputKind::kTiny,
    InputKind::kNearFp16Max,  InputKind::kLargeMean,
};

inline std::string ToString(InputKind kind) {
  switch (kind) {
    case InputKind::kGaussian:
      return "gaussian";
    case InputKind::kOutlierChannels:
      return "outlier channels";
    case InputKind::kHeavyTails:
      return "heavy tails";
    case InputKind::kConstant:
      return "constant";
    case InputKind::kConstantRows:
      return "constant rows";
    case InputKind::kZero:
      return "zero";
    case InputKind::kHugeToken:
      return "huge token";
    case InputKind::kTiny:
      return "tiny";
    case InputKind::kNearFp16Max:
      return "near fp16 max";
    case InputKind::kLargeMean:
      return "large mean";
  }
  return "?";
}

inline std::vector<float> MakeValues(const TileFormat& format, InputKind kind,
                                     std::mt19937& random) {
  const std::size_t channels = format.head_dim;
  std::normal_distribution<float> gauss;
  std::student_t_distribution<float> heavy(3.0f);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const std::size_t huge_token = random() % format.group;
  std::vector<float> mean(channels);
  for (float& m : mean) m = 6 * uniform(random);
  std::vector<float> values(std::size_t{format.group} * channels);
  for (std::size_t t = 0; t < format.group; ++t) {
    for (std::size_t d = 0; d < channels; ++d) {
      float x = gauss(random);
      switch (kind) {
        case InputKind::kGaussian:
          break;
        case InputKind::kOutlierChannels:
          if (d % 37 == 5) x = 20 * x + 4 * mean[d];
          break;
        case InputKind::kHeavyTails:
          x = heavy(random);
          break;
        case InputKind::kConstant:
          x = 1.5f;
          break;
        case InputKind::kConstantRows:
          if (t % 16 == 3) x = 0.75f;
          if (d % 16 == 7) x = 2.0f;
          break;
        case InputKind::kZero:
          x = 0;
          break;
        case InputKind::kHugeToken:
          if (t == huge_token) x *= 500;
          break;
        case InputKind::kTiny:
          x *= 1e-2f;
          break;
        case InputKind::kNearFp16Max:
          x = 60000 * uniform(random);
          break;
        case InputKind::kLargeMean:
          x += mean[d];
          break;
      }
      values[t * channels + d] = x;
    }
  }
  return values;
}

inline TileInput MakeInput(const TileFormat& format, InputKind kind, DType dtype,
                           std::uint32_t seed) {
  std::mt19937 random(seed);
  TileInput input;
  input.dtype = dtype;
  for (std::vector<std::uint16_t>* half : {&input.k, &input.v}) {
    for (const float x : MakeValues(format, kind, random)) half->push_back(FromFloat(x, dtype));
  }
  return input;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_TILE_INPUTS_H_
