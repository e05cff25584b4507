// Encode and decode at every SIMD level of this CPU, one core: microseconds per tile, the fastest
// and the median of the runs, and the ratio to the bound (the two passes per iteration alone). Runs
// of the two encoders alternate, so that what else the machine does falls on both; `more` is the
// median of what the refined one takes on top, run by run.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/encode_bound.h"
#include "kernels/refine.h"
#include "kernels/simd.h"

namespace kvmill {
namespace {

constexpr std::size_t kTiles =
    32;  // 2 MiB of input at head_dim 128: more than the caches next to the core hold for free.

struct Times {
  double fastest_us, median_us;
};

template <class Run>
double MicrosecondsOf(const Run& run) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  run();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kTiles;
}

double Median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

Times TimesOf(const std::vector<double>& samples) {
  return {*std::min_element(samples.begin(), samples.end()), Median(samples)};
}

// Calls `sample` until `milliseconds` have passed, once at least.
template <class Sample>
void Repeat(double milliseconds, const Sample& sample) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  do {
    sample();
  } while (std::chrono::duration<double, std::milli>(Clock::now() - begin).count() < milliseconds);
}

int Main(int argc, char** argv) {
  std::string name = "k4v2_g128";
  std::uint32_t head_dim = 128;
  double milliseconds = 300;
  CLI::App app("Encode and decode at every SIMD level of this CPU, one core: times of a tile.");
  app.add_option("format", name)->capture_default_str();
  app.add_option("head_dim", head_dim)->capture_default_str();
  app.add_option("milliseconds", milliseconds, "Of a measurement")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<TileFormat> parsed = ParseTileFormat(name, head_dim);
  if (!parsed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(parsed.status().message()).c_str());
    return 2;
  }
  const TileFormat format = *parsed;
  const std::size_t half_values = std::size_t{format.group} * format.head_dim;

  std::mt19937 random(1);
  std::normal_distribution<float> gauss;
  std::vector<std::uint16_t> input(2 * half_values * kTiles);
  for (std::uint16_t& v : input) v = FloatToFloat16(gauss(random));
  std::vector<std::uint16_t> output(input.size());
  std::vector<std::byte> records(RecordBytes(format) * kTiles);
  std::vector<std::byte> storage(EncodeScratchBytes(format) + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
  const absl::Span<std::byte> scratch(storage.data() + (64 - address % 64) % 64,
                                      EncodeScratchBytes(format));

  std::vector<const std::byte*> in_pages(2 * kTiles);
  std::vector<std::byte*> out_pages(2 * kTiles);
  std::vector<EncodeArgs> encode(kTiles);
  std::vector<DecodeArgs> decode(kTiles);
  std::vector<EncodeResult> results(kTiles);
  const std::ptrdiff_t stride = std::ptrdiff_t{2} * format.head_dim;
  for (std::size_t i = 0; i < 2 * kTiles; ++i) {
    in_pages[i] = reinterpret_cast<const std::byte*>(input.data() + i * half_values);
    out_pages[i] = reinterpret_cast<std::byte*>(output.data() + i * half_values);
  }
  for (std::size_t i = 0; i < kTiles; ++i) {
    std::byte* record = records.data() + i * RecordBytes(format);
    encode[i].k = {&in_pages[2 * i], 0, format.group, stride, 2, DType::kFloat16};
    encode[i].v = {&in_pages[2 * i + 1], 0, format.group, stride, 2, DType::kFloat16};
    encode[i].record = record;
    decode[i].record = record;
    decode[i].k = {&out_pages[2 * i], 0, format.group, stride, 2, DType::kFloat16};
    decode[i].v = {&out_pages[2 * i + 1], 0, format.group, stride, 2, DType::kFloat16};
  }

  const double raw_bytes = static_cast<double>(4 * half_values);
  const auto gb_per_s = [&](double us) { return raw_bytes / us / 1e3; };
  std::printf("%s head_dim %u, %zu tiles\n", name.c_str(), head_dim, kTiles);
  std::printf("%-10s %10s %10s %8s %8s %8s %10s %10s %8s %10s %10s %8s\n", "simd", "encode_us",
              "median", "GB/s", "bound_us", "ratio", "refined_us", "median", "more", "decode_us",
              "median", "GB/s");
  for (const std::string_view simd : CpuSimdNames()) {
    ForceCpuSimd(simd);
    std::vector<double> plain, refined, more, decoded;
    Repeat(2 * milliseconds, [&] {
      const auto run = [&](auto encoder) {
        return MicrosecondsOf(
            [&] { encoder(format, Frame::kModel, encode, absl::MakeSpan(results), scratch); });
      };
      plain.push_back(run(&EncodeTilesCpu));
      refined.push_back(run(&EncodeRefinedTilesCpu));
      more.push_back(refined.back() / plain.back() - 1);
    });
    const Times e = TimesOf(plain), r = TimesOf(refined);
    const double bound = MeasureEncodePassesMicroseconds(format);
    Repeat(milliseconds, [&] {
      decoded.push_back(
          MicrosecondsOf([&] { DecodeTilesCpu(format, Frame::kModel, decode, scratch); }));
    });
    const Times t = TimesOf(decoded);
    std::printf("%-10s %10.2f %10.2f %8.2f %8.2f %8.2f %10.2f %10.2f %7.1f%% %10.2f %10.2f %8.2f\n",
                std::string(simd).c_str(), e.fastest_us, e.median_us, gb_per_s(e.fastest_us), bound,
                bound > 0 ? e.fastest_us / bound : 0, r.fastest_us, r.median_us, 100 * Median(more),
                t.fastest_us, t.median_us, gb_per_s(t.fastest_us));
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
