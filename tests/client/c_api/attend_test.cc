// kvmill_attend against attention computed here, in double, from values that the library decoded.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

constexpr std::uint32_t kDim = SmallBlock::kHeadDim, kTokens = SmallBlock::kTokens;

class Attending : public CApiTest {
 protected:
  void SetUp() override {
    CApiTest::SetUp();
    // The first block stays in 16 bits, the others are tiles.
    ns_ = Open(::testing::UnitTest::GetInstance()->current_test_info()->name(), 1);
    for (std::uint32_t i = 0; i < 3; ++i) {
      const std::string key = std::to_string(i);
      const SmallBlock values(i + 1);
      const std::vector<kvmill_store_layer> layers = Inputs(values);
      kvmill_store_block block = Block(key.c_str(), layers);
      block.block_index = i;
      Finish(kvmill_store(client_, ns_, &block, 1, nullptr, nullptr, queue_, 2));
      keys_.push_back(key);
    }
    for (const std::string& name : keys_) {
      SmallBlock& decoded = blocks_.emplace_back();
      const std::vector<kvmill_fetch_output> outputs = Outputs(&decoded);
      const kvmill_key key = Key(name);
      const Outcome outcome = Finish(
          kvmill_fetch(client_, ns_, &key, 1, outputs.data(), 2, nullptr, nullptr, queue_, 1));
      ASSERT_EQ(BlockOf(outcome).code, KVMILL_OK) << BlockOf(outcome).message;
    }
    mapped_ = Map(ns_, keys_);
    for (std::size_t i = 0; i < query_.size(); ++i) {
      query_[i] = std::sin(static_cast<float>(i) * 0.7f);
    }
  }
  void TearDown() override {
    kvmill_mapped_free(mapped_);
    kvmill_namespace_free(ns_);
    CApiTest::TearDown();
  }

  kvmill_attention Decode(std::uint32_t q_heads = 4, std::uint32_t query_count = 1) {
    auto attention = Init<kvmill_attention>();
    attention.query = query_.data();
    attention.output = output_.data();
    attention.log_sum_exp = log_sum_exp_.data();
    attention.q_heads = q_heads;
    attention.query_count = query_count;
    return attention;
  }

  // Attends to layer 1 as `a` says, and compares with what comes out here.
  void ExpectRight(const kvmill_attention& a) {
    std::fill(output_.begin(), output_.end(), -1.0f);
    ASSERT_EQ(kvmill_attend(mapped_, 1, &a), KVMILL_OK) << kvmill_last_error();
    const std::size_t blocks = a.block_count == 0 ? 3 - a.first_block : a.block_count;
    const std::uint32_t heads = a.head_count == 0 ? 2 : a.head_count;
    const std::int64_t tokens = static_cast<std::int64_t>(blocks * kTokens);
    const double scale = a.scale == 0 ? 1 / std::sqrt(double{kDim}) : double{a.scale};
    double difference = 0, norm = 0;
    for (std::uint32_t row = 0; row < std::max(a.query_count, 1u) * a.q_heads; ++row) {
      const std::uint32_t head = a.head_begin + row % a.q_heads / (a.q_heads / heads);
      const std::int64_t position = tokens + a.query_offset + row / a.q_heads;
      const std::int64_t end = std::min(tokens, position + 1);
      const std::int64_t begin =
          a.window_tokens == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - a.window_tokens);
      double total = 0;
      std::vector<double> want(kDim);
      for (std::int64_t t = begin; t < end; ++t) {
        const SmallBlock& block = blocks_[a.first_block + static_cast<std::size_t>(t / kTokens)];
        const std::size_t at = (static_cast<std::size_t>(t % kTokens) * 2 + head) * kDim;
        double logit = 0;
        for (std::size_t d = 0; d < kDim; ++d) {
          logit += double{query_[row * kDim + d]} * double{FromBf16(block.values[2][at + d])};
        }
        logit *= scale;
        if (a.soft_cap > 0) logit = double{a.soft_cap} * std::tanh(logit / double{a.soft_cap});
        const double weight = std::exp(logit);
        total += weight;
        for (std::size_t d = 0; d < kDim; ++d) {
          want[d] += weight * double{FromBf16(block.values[3][at + d])};
        }
      }
      if (total == 0) {
        EXPECT_EQ(log_sum_exp_[row], -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(double{log_sum_exp_[row]}, std::log(total), 0.01) << "row " << row;
      }
      for (std::size_t d = 0; d < kDim; ++d) {
        const double mean = total == 0 ? 0 : want[d] / total;
        difference += std::pow(double{output_[row * kDim + d]} - mean, 2);
        norm += mean * mean;
      }
    }
    // What was decoded was rounded to bf16, which is the larger part of this.
    EXPECT_LE(std::sqrt(difference), 0.01 * std::sqrt(norm));
  }

  void Refused(const kvmill_attention& a, kvmill_code code, const char* text) {
    EXPECT_EQ(kvmill_attend(mapped_, 1, &a), code);
    EXPECT_NE(std::string(kvmill_last_error()).find(text), std::string::npos)
        << kvmill_last_error() << ", want " << text;
  }

  kvmill_namespace* ns_ = nullptr;
  kvmill_mapped* mapped_ = nullptr;
  std::vector<std::string> keys_;
  std::vector<SmallBlock> blocks_;
  std::vector<float> query_ = std::vector<float>(8 * 8 * kDim), output_ = query_;
  std::vector<float> log_sum_exp_ = std::vector<float>(64);
};

TEST_F(Attending, TheBlocksAreOfBothKinds) {
  std::vector<kvmill_mapped_head> heads(6);
  ASSERT_EQ(kvmill_mapped_heads(mapped_, 1, 0, 3, heads.data(), 6), KVMILL_OK);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(heads[i].kind, static_cast<std::uint32_t>(i < 2 ? KVMILL_HEAD_RAW : KVMILL_HEAD_TILE))
        << i;
  }
  EXPECT_EQ(heads[0].bytes, 2u * 2 * kTokens * kDim);
}

TEST_F(Attending, ANewTokenSeesAllBlocks) { ExpectRight(Decode()); }

TEST_F(Attending, EachChoiceDoesWhatItSays) {
  kvmill_attention a = Decode(8);
  a.first_block = 1;
  ExpectRight(a);
  a.first_block = 0;
  a.block_count = 1;
  ExpectRight(a);
  a = Decode(2);
  a.head_begin = 1;
  a.head_count = 1;
  ExpectRight(a);
  a = Decode();
  a.window_tokens = 70;
  ExpectRight(a);
  a.query_offset = -64;  // Two blocks are seen, the first of them in part.
  ExpectRight(a);
  a.window_tokens = 0;
  a.query_offset = -128;
  ExpectRight(a);
  a.query_offset = 1000;
  ExpectRight(a);
  a.window_tokens = 1000;  // All of them are too far back.
  ExpectRight(a);
  EXPECT_EQ(output_[0], 0.0f);
  a = Decode(4, 8);  // A chunk: each query sees one token more.
  a.query_offset = -8;
  ExpectRight(a);
  a = Decode();
  a.scale = 0.5f;
  a.soft_cap = 2;
  ExpectRight(a);
  a.log_sum_exp = nullptr;
  EXPECT_EQ(kvmill_attend(mapped_, 1, &a), KVMILL_OK);
}

TEST_F(Attending, QueriesAndOutputsMayHave16Bits) {
  kvmill_attention a = Decode();
  ExpectRight(a);
  const std::vector<float> want = output_;
  std::vector<std::uint16_t> query, output(4 * kDim);
  for (std::size_t i = 0; i < output.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &query_[i], sizeof(bits));
    query.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  a.query = query.data();
  a.output = output.data();
  a.query_type = a.output_type = KVMILL_VECTOR_BFLOAT16;
  ASSERT_EQ(kvmill_attend(mapped_, 1, &a), KVMILL_OK) << kvmill_last_error();
  for (std::size_t i = 0; i < output.size(); ++i) {
    EXPECT_NEAR(FromBf16(output[i]), want[i], 0.02f) << i;
  }
}

TEST_F(Attending, WhatIsWrongIsNamedAndNothingIsWritten) {
  std::fill(output_.begin(), output_.end(), -1.0f);
  const kvmill_attention good = Decode();
  kvmill_attention a = good;
  a.q_heads = 3;
  Refused(a, KVMILL_INVALID_ARGUMENT, "q_heads 3");
  a.q_heads = 0;
  Refused(a, KVMILL_INVALID_ARGUMENT, "q_heads 0");
  a = good;
  a.query = nullptr;
  Refused(a, KVMILL_INVALID_ARGUMENT, "null");
  a = good;
  a.query_type = 3;
  Refused(a, KVMILL_INVALID_ARGUMENT, "query_type 3");
  a = good;
  a.output_type = 9;
  Refused(a, KVMILL_INVALID_ARGUMENT, "output_type 9");
  a = good;
  a.scale = std::numeric_limits<float>::quiet_NaN();
  Refused(a, KVMILL_INVALID_ARGUMENT, "scale");
  a = good;
  a.soft_cap = -1;
  Refused(a, KVMILL_INVALID_ARGUMENT, "soft_cap -1");
  a = good;
  a.query_count = 65537;
  Refused(a, KVMILL_INVALID_ARGUMENT, "query_count 65537, at most 65536");
  a = good;
  a.query_offset = -193;
  Refused(a, KVMILL_INVALID_ARGUMENT, "query_offset -193, want -192");
  a.query_offset = INT64_MAX;
  Refused(a, KVMILL_INVALID_ARGUMENT, "query_offset");
  a.query_offset = INT64_MIN;
  Refused(a, KVMILL_INVALID_ARGUMENT, "query_offset");
  a = good;
  a.head_begin = 1;
  Refused(a, KVMILL_INVALID_ARGUMENT, "head_begin 1");
  a.head_count = UINT32_MAX;
  Refused(a, KVMILL_INVALID_ARGUMENT, "head_count");
  a = good;
  a.first_block = 1;
  a.block_count = 3;
  Refused(a, KVMILL_OUT_OF_RANGE, "3 blocks from block 1 on, there are 3");
  a.first_block = SIZE_MAX;
  Refused(a, KVMILL_OUT_OF_RANGE, "there are 3");
  a = good;
  a.struct_bytes = offsetof(kvmill_attention, q_heads);
  Refused(a, KVMILL_INVALID_ARGUMENT, "struct_bytes");
  EXPECT_EQ(kvmill_attend(mapped_, 2, &good), KVMILL_OUT_OF_RANGE);
  EXPECT_EQ(kvmill_attend(mapped_, 0, nullptr), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(std::count(output_.begin(), output_.end(), -1.0f),
            static_cast<std::ptrdiff_t>(output_.size()));
}

TEST_F(Attending, AMissIsOneAndAWindowMaySpareIt) {
  kvmill_mapped_free(mapped_);
  mapped_ = Map(ns_, {"missing", "1", "2"});
  kvmill_attention a = Decode();
  Refused(a, KVMILL_NOT_FOUND, "");
  a.window_tokens = 100;
  EXPECT_EQ(kvmill_attend(mapped_, 1, &a), KVMILL_OK) << kvmill_last_error();
  kvmill_mapped_free(mapped_);
  mapped_ = Map(ns_, {"1", "missing"});
  a.window_tokens = 0;
  Refused(a, KVMILL_NOT_FOUND, "");
  kvmill_mapped_free(mapped_);
  mapped_ = Map(ns_, keys_);
  kvmill_mapped_release(mapped_);
  Refused(a, KVMILL_ABORTED, "given back");
}

}  // namespace
}  // namespace kvmill::testing
