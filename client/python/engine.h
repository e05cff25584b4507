// The engine's memory as Python has it: shared memory, its description, and blocks in its pages.
// Internal to client/python. Everything here wants the GIL.
#ifndef KVMILL_CLIENT_PYTHON_ENGINE_H_
#define KVMILL_CLIENT_PYTHON_ENGINE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "client/kvmill_engine.h"
#include "client/python/native.h"

namespace kvmill::python {

// Memory that a daemon can read. A buffer; whoever shows it to others keeps it.
class SharedMemory {
 public:
  explicit SharedMemory(const py::object& bytes) {
    Need(kvmill_shared_memory_create(ToInt<std::size_t>(bytes, "bytes"), &memory_));
  }
  ~SharedMemory() { kvmill_shared_memory_free(memory_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  const kvmill_shared_memory* get() const { return memory_; }

 private:
  kvmill_shared_memory* memory_ = nullptr;
};

// (regions, layers, assembling_boot_id) as the C ABI's structs. A region is (base, bytes, memory,
// offset_bytes, (handle, allocation_bytes, device)); memory a SharedMemory, or None, and so are the
// three.
class Geometry {
 public:
  explicit Geometry(const py::tuple& from)
      : boot_id_(from[2].cast<std::string>()), geometry_(Init<kvmill_engine_geometry>()) {
    if (boot_id_.find('\0') != std::string::npos) Invalid("a boot id with a zero character");
    for (const py::handle item : py::cast<py::sequence>(from[0])) {
      const auto region = py::cast<py::tuple>(item);
      regions_.push_back(
          {ToInt<std::uint64_t>(region[0], "base"), ToInt<std::uint64_t>(region[1], "bytes")});
      AddSource(region[2], region[3], region[4]);
    }
    const auto all = py::cast<py::sequence>(from[1]);
    places_.reserve(2 * all.size());
    for (const py::handle item : all) AddLayers(py::cast<py::tuple>(item));
    geometry_.regions = regions_.data();
    geometry_.region_count = regions_.size();
    geometry_.sources = sources_.data();
    geometry_.source_count = sources_.size();
    geometry_.layers = layers_.data();
    geometry_.layers_count = layers_.size();
    geometry_.assembling_boot_id = boot_id_.c_str();
  }
  Geometry(const Geometry&) = delete;
  Geometry& operator=(const Geometry&) = delete;
  const kvmill_engine_geometry& get() const { return geometry_; }
  // Whose descriptors it has.
  const std::vector<py::object>& memories() const { return memories_; }

 private:
  void AddSource(const py::object& memory, const py::object& offset, const py::object& device) {
    auto source = Init<kvmill_region_source>();
    source.fd = -1;
    source.offset_bytes = ToInt<std::uint64_t>(offset, "offset");
    if (!memory.is_none()) {
      source.kind = KVMILL_REGION_MEMFD;
      source.fd = kvmill_shared_memory_fd(memory.cast<const SharedMemory&>().get());
      memories_.push_back(memory);
    } else if (!device.is_none()) {
      const auto from = py::cast<py::tuple>(device);
      source.kind = KVMILL_REGION_DEVICE_IPC;
      CopyBytes(from[0], "handle", source.handle, sizeof(source.handle), false);
      source.allocation_bytes = ToInt<std::uint64_t>(from[1], "allocation_bytes");
      CopyBytes(from[2], "device", source.device, sizeof(source.device), true);
    }
    sources_.push_back(source);
  }

  static void CopyBytes(const py::object& from, const char* what, void* to, std::size_t want,
                        bool may_be_empty) {
    const auto bytes = from.cast<std::string>();
    if (bytes.size() != want && !(may_be_empty && bytes.empty())) {
      Invalid(std::string(what) + " of " + std::to_string(bytes.size()) + " bytes, want " +
              std::to_string(want));
    }
    std::memcpy(to, bytes.data(), bytes.size());
  }

  const kvmill_engine_place* AddPlaces(const py::sequence& from) {
    std::vector<kvmill_engine_place>& places = places_.emplace_back();
    for (const py::handle item : from) {
      const auto place = py::cast<py::tuple>(item);
      places.push_back({ToInt<std::uint64_t>(place[1], "offset_bytes"),
                        ToInt<std::uint32_t>(place[0], "region"), 0});
    }
    return places.data();
  }

  void AddLayers(const py::tuple& from) {
    auto to = Init<kvmill_engine_layers>();
    const auto keys = py::cast<py::sequence>(from[0]);
    const auto values = py::cast<py::sequence>(from[1]);
    if (values.size() != 0 && values.size() != keys.size()) {
      Invalid(std::to_string(values.size()) + " values, want none or one for each of " +
              std::to_string(keys.size()) + " keys");
    }
    to.layer_count = keys.size();
    to.keys = AddPlaces(keys);
    to.values = values.size() == 0 ? nullptr : AddPlaces(values);
    to.page_count = ToInt<std::uint64_t>(from[2], "page_count");
    to.page_bytes = ToInt<std::uint64_t>(from[3], "page_bytes");
    to.page_stride_bytes = ToInt<std::uint64_t>(from[4], "page_stride_bytes");
    to.token_stride_bytes = ToInt<std::uint64_t>(from[5], "token_stride_bytes");
    to.head_stride_bytes = ToInt<std::uint64_t>(from[6], "head_stride_bytes");
    to.group = ToInt<std::uint32_t>(from[7], "group");
    to.layer_begin = ToInt<std::uint32_t>(from[8], "layer_begin");
    to.element = ToInt<std::uint32_t>(from[9], "element");
    to.block_tokens = ToInt<std::uint32_t>(from[10], "block_tokens");
    to.head_dim = ToInt<std::uint32_t>(from[11], "head_dim");
    to.head_begin = ToInt<std::uint32_t>(from[12], "head_begin");
    to.head_count = ToInt<std::uint32_t>(from[13], "head_count");
    to.page_tokens = ToInt<std::uint32_t>(from[14], "page_tokens");
    layers_.push_back(to);
  }

  std::string boot_id_;
  std::vector<kvmill_engine_region> regions_;
  std::vector<kvmill_region_source> sources_;
  std::vector<py::object> memories_;
  std::vector<std::vector<kvmill_engine_place>> places_;
  std::vector<kvmill_engine_layers> layers_;
  kvmill_engine_geometry geometry_;
};

// Blocks of a store of pages: (key, parent, token_count, block_index, pages of each layer group).
// Keys are bytes objects, which the sequence keeps alive.
class PageBlocks {
 public:
  explicit PageBlocks(const py::sequence& from) {
    numbers_.reserve(from.size());
    lists_.reserve(from.size());
    for (const py::handle item : from) Add(py::cast<py::tuple>(item));
  }
  PageBlocks(const PageBlocks&) = delete;
  PageBlocks& operator=(const PageBlocks&) = delete;
  const kvmill_page_block* data() const { return blocks_.data(); }
  std::size_t size() const { return blocks_.size(); }

 private:
  void Add(const py::tuple& from) {
    auto block = Init<kvmill_page_block>();
    const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(from[0], from[1]));
    block.key = keys[0];
    block.parent = keys[1];
    block.token_count = ToInt<std::uint32_t>(from[2], "token_count");
    block.block_index = ToInt<std::uint32_t>(from[3], "block_index");
    auto& numbers = numbers_.emplace_back();
    auto& lists = lists_.emplace_back();
    for (const py::handle group : py::cast<py::sequence>(from[4])) {
      std::vector<std::uint64_t>& pages = numbers.emplace_back();
      for (const py::handle page : py::cast<py::sequence>(group)) {
        pages.push_back(ToInt<std::uint64_t>(page, "page"));
      }
    }
    for (const std::vector<std::uint64_t>& pages : numbers) {
      lists.push_back({pages.data(), pages.size()});
    }
    block.pages = lists.data();
    block.group_count = lists.size();
    blocks_.push_back(block);
  }

  std::vector<std::vector<std::vector<std::uint64_t>>> numbers_;  // By block and group.
  std::vector<std::vector<kvmill_page_numbers>> lists_;
  std::vector<kvmill_page_block> blocks_;
};

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_ENGINE_H_
