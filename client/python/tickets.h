// Tickets as Python has them. Internal to client/python. Everything here wants the GIL.
#ifndef KVMILL_CLIENT_PYTHON_TICKETS_H_
#define KVMILL_CLIENT_PYTHON_TICKETS_H_

#include <string>
#include <vector>

#include "client/kvmill_ticket.h"
#include "client/python/native.h"

namespace kvmill::python {

// (key, parent, token_count, block_index) each; the keys are bytes objects of `blocks`, which keeps
// them alive while this is used.
class PromisedBlocks {
 public:
  explicit PromisedBlocks(const py::sequence& blocks) {
    for (const py::handle item : blocks) {
      const auto from = py::cast<py::tuple>(item);
      auto block = Init<kvmill_promised_block>();
      const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(from[0], from[1]));
      block.key = keys[0];
      block.parent = keys[1];
      block.token_count = ToInt<std::uint32_t>(from[2], "token_count");
      block.block_index = ToInt<std::uint32_t>(from[3], "block_index");
      blocks_.push_back(block);
    }
  }
  const kvmill_promised_block* data() const { return blocks_.data(); }
  std::size_t size() const { return blocks_.size(); }

 private:
  std::vector<kvmill_promised_block> blocks_;
};

// Valid as long as `bytes`.
inline kvmill_ticket TicketOf(const py::bytes& bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, static_cast<std::size_t>(size)};
}

// (code, message, retry_after_ms, blocks) of a redeem that ended, however it did.
py::tuple RedeemedOf(const kvmill_event& event);
// (number of blocks, [(index, block)] of those that changed) of an update. A block is (key, group,
// block_index, token_count, layer_count, fate, miss, layers_here, words of layers).
py::tuple RedeemUpdateOf(const kvmill_result* result);

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_TICKETS_H_
