// Mapped blocks: memory of the daemon that Python reads in place, and attention over it.
#include "client/python/mapped.h"
#include "client/python/native.h"

namespace kvmill::python {
namespace {

using MappedPtr = std::shared_ptr<Mapped>;

// Some of the daemon's memory, for the buffer protocol: read-only, and mapped as long as somebody
// has it.
struct Memory {
  MappedPtr mapped;
  const void* data;
  std::size_t bytes;
};

// Some of the memory of the daemon's GPU: an address of the client's device.
struct DeviceMemory {
  MappedPtr mapped;
  const void* data;
  std::size_t bytes;
};

bool IsOnGpu(const Mapped& mapped, std::size_t block, std::size_t layer) {
  std::uint32_t tier = 0;
  Need(kvmill_mapped_memory(mapped.get(), block, layer, &tier));
  return tier == KVMILL_TIER_GPU;
}

// Whichever of them it is.
py::object MemoryOf(const MappedPtr& mapped, bool on_gpu, const void* data, std::size_t bytes) {
  if (on_gpu) return py::cast(DeviceMemory{mapped, data, bytes});
  return py::cast(Memory{mapped, data, bytes});
}

py::list BlocksOf(const Mapped& mapped) {
  py::list blocks;
  for (std::size_t i = 0; i < kvmill_mapped_block_count(mapped.get()); ++i) {
    auto block = Init<kvmill_block_result>();
    Need(kvmill_mapped_block(mapped.get(), i, &block));
    blocks.append(py::make_tuple(block.code, block.message, block.retry_after_ms, block.tier,
                                 block.token_count));
  }
  return blocks;
}

py::object PageOf(const MappedPtr& mapped, const py::object& block, const py::object& layer) {
  const auto b = ToInt<std::size_t>(block, "block");
  const auto l = ToInt<std::size_t>(layer, "layer");
  auto page = Init<kvmill_page>();
  Need(kvmill_mapped_page(mapped->get(), b, l, &page));
  return MemoryOf(mapped, IsOnGpu(*mapped, b, l), page.data, page.bytes);
}

// (kind, memory or None, tokens) of each head.
py::list HeadsOf(const MappedPtr& mapped, const Namespace& ns, const py::object& block,
                 const py::object& layer) {
  const auto l = ToInt<std::size_t>(layer, "layer");
  std::vector<kvmill_mapped_head> heads(l < ns.layer_count() ? ns.group_of(l).kv_heads : 1);
  const auto b = ToInt<std::size_t>(block, "block");
  Need(kvmill_mapped_heads(mapped->get(), l, b, 1, heads.data(), heads.size()));
  const bool on_gpu = IsOnGpu(*mapped, b, l);
  py::list list;
  for (const kvmill_mapped_head& head : heads) {
    const py::object memory = head.data == nullptr
                                  ? py::object(py::none())
                                  : MemoryOf(mapped, on_gpu, head.data, head.bytes);
    list.append(py::make_tuple(head.kind, memory, head.tokens));
  }
  return list;
}

void Check(const Mapped& mapped, const py::object& first, const py::object& count) {
  Need(kvmill_mapped_check(mapped.get(), ToInt<std::size_t>(first, "first"),
                           ToInt<std::size_t>(count, "count")));
}

void Verify(const Mapped& mapped) {
  kvmill_code code = KVMILL_OK;
  std::string message;
  {
    const py::gil_scoped_release release;
    code = kvmill_mapped_verify(mapped.get());
    if (code != KVMILL_OK) message = kvmill_last_error();
  }
  if (code != KVMILL_OK) throw Failure{code, message};
}

// Elements of a buffer in C order: KVMILL_VECTOR_..., and how many there are.
std::uint32_t VectorOf(const Py_buffer& buffer, const Place& place) {
  const std::string format = buffer.format == nullptr ? "B" : buffer.format;
  if (format == "f") return KVMILL_VECTOR_FLOAT32;
  if (format == "e") return KVMILL_VECTOR_FLOAT16;
  if (format == "H") return KVMILL_VECTOR_BFLOAT16;
  Invalid(place, "elements of format '" + format + "', want float32, float16 or uint16");
}

// `query` and `output` are [queries, q_heads, head_dim], `log_sum_exp` [queries, q_heads]: buffers
// in C order, the outputs of float32. `choices`: first_block, block_count, query_offset,
// head_begin, head_count, window_tokens, scale, soft_cap.
void Attend(const Mapped& mapped, const Namespace& ns, const py::object& layer,
            const py::object& query, const py::object& output, const py::object& log_sum_exp,
            const py::tuple& choices) {
  const auto l = ToInt<std::size_t>(layer, "layer");
  if (l >= ns.layer_count()) {
    Invalid("layer " + std::to_string(l) + " of " + std::to_string(ns.layer_count()));
  }
  Pins pins;
  const Place place = {0, l, "query"};
  const Py_buffer& from = ToBytes(query, false, place, &pins);
  const Py_buffer& to = ToBytes(output, true, {0, l, "output"}, &pins);
  const Py_buffer& sums = ToBytes(log_sum_exp, true, {0, l, "log_sum_exp"}, &pins);
  const std::ptrdiff_t head_dim = ns.group_of(l).head_dim;
  if (from.ndim != 3 || from.shape[2] != head_dim) {
    Invalid(place, "want [queries, query heads, " + std::to_string(head_dim) + "]");
  }
  const std::ptrdiff_t rows = from.shape[0] * from.shape[1];
  if (to.len != rows * head_dim * 4 || sums.len != rows * 4) Invalid(place, "outputs do not fit");
  if (from.shape[0] == 0) return;
  auto attention = Init<kvmill_attention>();
  attention.query = from.buf;
  attention.output = to.buf;
  attention.log_sum_exp = static_cast<float*>(sums.buf);
  attention.query_type = VectorOf(from, place);
  attention.query_count = static_cast<std::uint32_t>(
      from.shape[0] > UINT32_MAX ? UINT32_MAX : from.shape[0]);  // Refused, with its limit.
  attention.q_heads =
      static_cast<std::uint32_t>(from.shape[1] > UINT32_MAX ? UINT32_MAX : from.shape[1]);
  attention.first_block = ToInt<std::size_t>(choices[0], "first_block");
  attention.block_count = ToInt<std::size_t>(choices[1], "block_count");
  attention.query_offset = ToSigned(choices[2], "query_offset", INT64_MIN, INT64_MAX);
  attention.head_begin = ToInt<std::uint32_t>(choices[3], "head_begin");
  attention.head_count = ToInt<std::uint32_t>(choices[4], "head_count");
  attention.window_tokens = ToInt<std::uint32_t>(choices[5], "window_tokens");
  attention.scale = choices[6].cast<float>();
  attention.soft_cap = choices[7].cast<float>();
  kvmill_code code = KVMILL_OK;
  std::string message;
  {
    const py::gil_scoped_release release;
    code = kvmill_attend(mapped.get(), l, &attention);
    if (code != KVMILL_OK) message = kvmill_last_error();
  }
  if (code != KVMILL_OK) throw Failure{code, message};
}

}  // namespace

std::shared_ptr<Mapped> MappedOf(const kvmill_result* result) {
  kvmill_mapped* mapped = nullptr;
  Need(kvmill_result_mapped(result, &mapped));
  return std::make_shared<Mapped>(mapped);
}

void AddMapped(py::module_& m) {
  py::class_<Memory>(m, "Memory", py::buffer_protocol()).def_buffer([](Memory& memory) {
    const auto bytes = static_cast<py::ssize_t>(memory.bytes);
    return py::buffer_info(const_cast<void*>(memory.data), 1, "B", 1, {bytes}, {py::ssize_t{1}},
                           /*readonly=*/true);
  });
  py::class_<DeviceMemory>(m, "DeviceMemory")
      .def_property_readonly(
          "address",
          [](const DeviceMemory& memory) { return reinterpret_cast<std::uintptr_t>(memory.data); })
      .def_property_readonly("bytes", [](const DeviceMemory& memory) { return memory.bytes; });
  py::class_<Mapped, MappedPtr>(m, "Mapped")
      .def("blocks", &BlocksOf)
      .def("page", &PageOf)
      .def("memory",
           [](const Mapped& mapped, const py::object& block, const py::object& layer) {
             std::uint32_t tier = 0;
             Need(kvmill_mapped_memory(mapped.get(), ToInt<std::size_t>(block, "block"),
                                       ToInt<std::size_t>(layer, "layer"), &tier));
             return tier;
           })
      .def("heads", &HeadsOf)
      .def("check", &Check)
      .def("verify", &Verify)
      .def("attend", &Attend)
      .def("release", [](const Mapped& mapped) { Need(kvmill_mapped_release(mapped.get())); })
      .def_property_readonly(
          "left_ms", [](const Mapped& mapped) { return kvmill_mapped_left_ms(mapped.get()); });
}

}  // namespace kvmill::python
