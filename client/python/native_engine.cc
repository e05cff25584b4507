// Shared memory for Python: a writable buffer that a daemon can read.
#include "client/python/engine.h"
#include "client/python/native.h"

namespace kvmill::python {

void AddEngine(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init<const py::object&>())
      .def_buffer([](const SharedMemory& memory) {
        const auto bytes = static_cast<py::ssize_t>(kvmill_shared_memory_bytes(memory.get()));
        return py::buffer_info(kvmill_shared_memory_data(memory.get()), 1, "B", 1, {bytes},
                               {py::ssize_t{1}}, /*readonly=*/false);
      })
      .def_property_readonly(
          "address",
          [](const SharedMemory& memory) {
            return reinterpret_cast<std::uintptr_t>(kvmill_shared_memory_data(memory.get()));
          })
      .def_property_readonly(
          "bytes",
          [](const SharedMemory& memory) { return kvmill_shared_memory_bytes(memory.get()); })
      .def_property_readonly(
          "fd", [](const SharedMemory& memory) { return kvmill_shared_memory_fd(memory.get()); });
}

}  // namespace kvmill::python
