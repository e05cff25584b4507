#include "client/eval/error_study.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {
namespace {

// One head of K or V, as floats.
std::vector<float> HeadOf(const cli::Tensor& tensor, std::uint32_t head, std::uint32_t tokens) {
  std::vector<float> values;
  values.reserve(std::size_t{tokens} * tensor.head_dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t row = (t * tensor.heads + head) * tensor.head_dim;
    for (std::size_t d = 0; d < tensor.head_dim; ++d) {
      values.push_back(ToFloat(tensor.values[row + d], tensor.dtype));
    }
  }
  return values;
}

absl::Status CheckFinite(const cli::Tensor& tensor, absl::string_view what, std::size_t layer) {
  for (std::size_t i = 0; i < tensor.values.size(); ++i) {
    const float x = ToFloat(tensor.values[i], tensor.dtype);
    if (std::isfinite(x)) continue;
    const std::size_t row = i / tensor.head_dim;
    return absl::InvalidArgumentError(absl::StrCat(
        what, " of layer ", layer, ": token ", row / tensor.heads, " head ", row % tensor.heads,
        " channel ", i % tensor.head_dim, " is ", x, "; only finite values can be quantized"));
  }
  return absl::OkStatus();
}

absl::Status CheckQueries(const cli::Tensor& q, const cli::Tensor& k, std::size_t layer) {
  if (q.tokens != k.tokens || q.head_dim != k.head_dim || q.heads % k.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "queries of layer ", layer, " are ", q.ShapeString(), ", K is ", k.ShapeString(),
        "; tokens and head_dim must be the same, query heads a multiple of KV heads"));
  }
  return CheckFinite(q, "a query", layer);
}

Queries TakeQueries(const cli::Tensor& q, std::uint32_t kv_heads, std::uint32_t head,
                    std::uint32_t tokens, std::uint32_t count) {
  const std::uint32_t sharing = q.heads / kv_heads;
  Queries queries;
  queries.given = true;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto end = static_cast<std::uint32_t>(std::uint64_t{i + 1} * tokens / count);
    const std::uint32_t token = std::max(end, 1u) - 1;
    const std::size_t row =
        (std::size_t{token} * q.heads + std::size_t{head} * sharing + i % sharing) * q.head_dim;
    for (std::size_t d = 0; d < q.head_dim; ++d) {
      queries.values.push_back(ToFloat(q.values[row + d], q.dtype));
    }
    queries.token_ends.push_back(token + 1);
  }
  return queries;
}

// A method with a format of one head_dim.
struct Candidate {
  const Method* method;
  std::string format;
  std::unique_ptr<Quantizer> quantizer;
};

absl::StatusOr<std::vector<Candidate>> MakeCandidates(const ErrorStudy& study,
                                                      std::uint32_t head_dim) {
  std::vector<Candidate> candidates;
  for (const std::string& name : study.formats) {
    KVMILL_ASSIGN_OR_RETURN(const TileFormat format, ParseStudyFormat(name, head_dim));
    for (const Method* method : study.methods) {
      if (method->two_bit_keys && format.key_bits != 2) continue;
      candidates.push_back({method, ToString(format), method->make(format)});
    }
  }
  if (candidates.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("none of these methods has any of the formats ",
                                                   absl::StrJoin(study.formats, ", "),
                                                   ": they take 2-bit keys"));
  }
  return candidates;
}

// Everything about one head that does not depend on the method.
struct Head {
  std::vector<float> k, v;
  Queries queries;
  std::vector<double> outputs;
};

ErrorRow MeasureHead(const Candidate& candidate, const Head& head, const HeadValues& k,
                     const HeadValues& v) {
  const Decoded decoded_k = candidate.quantizer->Quantize(Half::kKey, k);
  const Decoded decoded_v = candidate.quantizer->Quantize(Half::kValue, v);
  ErrorRow row;
  row.method = std::string(candidate.method->name);
  row.format = candidate.format;
  row.n = k.tokens;
  row.bits_per_element = static_cast<double>(decoded_k.bits + decoded_v.bits) /
                         static_cast<double>(k.values.size() + v.values.size());
  row.k = MeasureHalf(k, decoded_k.values);
  row.v = MeasureHalf(v, decoded_v.values);
  row.attention_error = OutputError(
      head.outputs, Attend(head.queries, decoded_k.values, decoded_v.values, k.head_dim));
  row.given_queries = head.queries.given;
  row.raw_blocks = decoded_k.raw_blocks + decoded_v.raw_blocks;
  return row;
}

constexpr Metric kMetrics[] = {
    {"attention_error", "Attention output error",
     [](const ErrorRow& r) { return r.attention_error; }},
    {"rel_error_k", "Error of K", [](const ErrorRow& r) { return r.k.relative; }},
    {"rel_error_v", "Error of V", [](const ErrorRow& r) { return r.v.relative; }},
    {"token_p95_k", "Error of K's worst tokens (95th percentile)",
     [](const ErrorRow& r) { return r.k.token_p95; }},
    {"magnitude_error", "Magnitude error of K", [](const ErrorRow& r) { return r.k.magnitude; }},
    {"direction_error", "Direction error of K", [](const ErrorRow& r) { return r.k.direction; }},
};

}  // namespace

absl::Span<const Metric> Metrics() { return kMetrics; }

absl::StatusOr<std::uint32_t> MeasuredTokens(const ErrorStudy& study,
                                             const std::vector<cli::LayerTensors>& layers) {
  std::uint32_t group = 0;
  for (const std::string& name : study.formats) {
    KVMILL_ASSIGN_OR_RETURN(const TileFormat format, ParseStudyFormat(name, 128));
    group = std::max<std::uint32_t>(group, format.group);
  }
  if (group == 0) return absl::InvalidArgumentError("no format is given");
  if (layers.empty()) return absl::InvalidArgumentError("there are no layers");
  const std::uint32_t tokens = layers[0].k.tokens;
  if (tokens < group) {
    return absl::InvalidArgumentError(
        absl::StrCat("K and V have ", tokens, " tokens, and a tile of these formats has ", group));
  }
  return tokens / group * group;
}

absl::StatusOr<std::vector<ErrorRow>> MeasureErrors(
    const ErrorStudy& study, const std::vector<cli::LayerTensors>& layers,
    const std::vector<std::optional<cli::Tensor>>& queries) {
  KVMILL_ASSIGN_OR_RETURN(const std::uint32_t tokens, MeasuredTokens(study, layers));
  std::size_t total = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const cli::LayerTensors& tensors = layers[layer];
    KVMILL_RETURN_IF_ERROR(ParseStudyFormat(study.formats[0], tensors.k.head_dim).status());
    KVMILL_RETURN_IF_ERROR(CheckFinite(tensors.k, "K", layer));
    KVMILL_RETURN_IF_ERROR(CheckFinite(tensors.v, "V", layer));
    if (queries[layer]) KVMILL_RETURN_IF_ERROR(CheckQueries(*queries[layer], tensors.k, layer));
    total += tensors.k.heads;
  }
  std::vector<std::vector<ErrorRow>> by_candidate;
  std::vector<Candidate> candidates;
  std::uint32_t head_dim = 0;
  std::size_t done = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const cli::LayerTensors& tensors = layers[layer];
    if (tensors.k.head_dim != head_dim) {
      head_dim = tensors.k.head_dim;
      KVMILL_ASSIGN_OR_RETURN(candidates, MakeCandidates(study, head_dim));
      by_candidate.resize(candidates.size());
    }
    for (std::uint32_t h = 0; h < tensors.k.heads; ++h) {
      Head head;
      head.k = HeadOf(tensors.k, h, tokens);
      head.v = HeadOf(tensors.v, h, tokens);
      const HeadValues k{head.k, tokens, head_dim, tensors.k.dtype};
      const HeadValues v{head.v, tokens, head_dim, tensors.v.dtype};
      head.queries = queries[layer] ? TakeQueries(*queries[layer], tensors.k.heads, h, tokens,
                                                  study.queries_per_head)
                                    : SurrogateQueries(k, study.queries_per_head,
                                                       study.seed * 1000003 + layer * 1009 + h);
      head.outputs = Attend(head.queries, head.k, head.v, head_dim);
      for (std::size_t c = 0; c < candidates.size(); ++c) {
        ErrorRow row = MeasureHead(candidates[c], head, k, v);
        row.layer = static_cast<std::uint32_t>(layer);
        row.head = h;
        by_candidate[c].push_back(std::move(row));
        if (study.progress) study.progress(done * candidates.size() + c, total * candidates.size());
      }
      ++done;
    }
  }
  std::vector<ErrorRow> rows;
  for (std::vector<ErrorRow>& some : by_candidate) {
    std::move(some.begin(), some.end(), std::back_inserter(rows));
  }
  return rows;
}

std::vector<MethodSummary> Summarize(const std::vector<ErrorRow>& rows) {
  std::vector<MethodSummary> summaries;
  std::vector<std::vector<double>> first;  // Of the format's first method, one a metric.
  for (std::size_t begin = 0, end; begin < rows.size(); begin = end) {
    end = begin;
    MethodSummary summary;
    summary.method = rows[begin].method;
    summary.format = rows[begin].format;
    std::vector<std::vector<double>> samples(Metrics().size());
    for (; end < rows.size() && rows[end].method == summary.method &&
           rows[end].format == summary.format;
         ++end) {
      for (std::size_t m = 0; m < samples.size(); ++m) {
        samples[m].push_back(Metrics()[m].of(rows[end]));
      }
      summary.bits_per_element += rows[end].bits_per_element;
      summary.raw_blocks += rows[end].raw_blocks;
    }
    summary.bits_per_element /= static_cast<double>(end - begin);
    if (summaries.empty() || summaries.back().format != summary.format) first = samples;
    for (std::size_t m = 0; m < samples.size(); ++m) {
      summary.spreads.push_back(SpreadOf(samples[m]));
      summary.signs.push_back(TestSigns(samples[m], first[m]));
    }
    summaries.push_back(std::move(summary));
  }
  for (MethodSummary& one : summaries) {
    one.best_at_its_bits =
        std::none_of(summaries.begin(), summaries.end(), [&](const MethodSummary& other) {
          // What doubles cannot tell apart counts as equal.
          return &other != &one && other.bits_per_element <= one.bits_per_element + 1e-9 &&
                 other.spreads[0].median < one.spreads[0].median;
        });
  }
  for (auto begin = summaries.begin(); begin != summaries.end();) {
    const auto end = std::find_if(
        begin, summaries.end(), [&](const MethodSummary& s) { return s.format != begin->format; });
    std::stable_sort(begin, end, [](const MethodSummary& a, const MethodSummary& b) {
      return a.bits_per_element < b.bits_per_element - 1e-9;
    });
    begin = end;
  }
  return summaries;
}

}  // namespace kvmill::eval
