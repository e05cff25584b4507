// What of redeems comes out of queues.
#include "client/python/tickets.h"

namespace kvmill::python {
namespace {

py::tuple BlockOf(const kvmill_result* result, std::size_t index) {
  auto block = Init<kvmill_redeemed_block>();
  Need(kvmill_result_redeemed_block(result, index, &block));
  py::tuple words(block.layer_word_count);
  for (std::size_t w = 0; w < block.layer_word_count; ++w) words[w] = block.layer_words[w];
  return py::make_tuple(py::bytes(static_cast<const char*>(block.key.data), block.key.bytes),
                        block.group, block.block_index, block.token_count, block.layer_count,
                        block.fate, block.miss, block.layers_here, words);
}

}  // namespace

py::tuple RedeemedOf(const kvmill_event& event) {
  auto redeem = Init<kvmill_redeem_result>();
  Need(kvmill_result_redeem(event.result, &redeem));
  py::list blocks;
  for (std::size_t i = 0; i < redeem.block_count; ++i) blocks.append(BlockOf(event.result, i));
  return py::make_tuple(event.code, kvmill_result_message(event.result), event.retry_after_ms,
                        blocks);
}

py::tuple RedeemUpdateOf(const kvmill_result* result) {
  auto redeem = Init<kvmill_redeem_result>();
  Need(kvmill_result_redeem(result, &redeem));
  py::list changed;
  for (std::size_t i = 0; i < redeem.changed_count; ++i) {
    changed.append(py::make_tuple(redeem.changed[i], BlockOf(result, redeem.changed[i])));
  }
  return py::make_tuple(redeem.block_count, changed);
}

}  // namespace kvmill::python
