// Kitty (Xia et al., arXiv:2511.18643, "dynamic channel-wise precision boost"): KIVI's axes, but of
// the channels of keys a share, those with the largest mean magnitude over the page's tokens, have
// twice the bits. A page of n tokens stores, per channel, n * bits + 32 bits and one bit that says
// which; values as KIVI.
//
// Ours differs: pages are the tiles' 64 or 128 tokens; no tokens are kept in 16 bits (the paper
// keeps the first and the last ones). The paper's share is 12.5 % or, "Pro", 25 %, with 2-bit
// keys.
#ifndef KVMILL_CLIENT_EVAL_KITTY_H_
#define KVMILL_CLIENT_EVAL_KITTY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "client/eval/quantizer.h"

namespace kvmill::eval {

// Which channels of [tokens][head_dim] have the largest mean magnitude: head_dim * share of them,
// rounded down; of equal ones the lower index.
std::vector<bool> BoostedChannels(const float* values, std::size_t tokens, std::size_t head_dim,
                                  double share);

std::unique_ptr<Quantizer> MakeKitty(std::uint32_t key_bits, std::uint32_t value_bits,
                                     std::uint32_t page_tokens, double share);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_KITTY_H_
