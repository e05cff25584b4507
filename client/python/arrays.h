// Python objects as memory: the buffer protocol and DLPack, both ways, without copies. Internal to
// client/python. Everything here wants the GIL.
#ifndef KVMILL_CLIENT_PYTHON_ARRAYS_H_
#define KVMILL_CLIENT_PYTHON_ARRAYS_H_

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/kvmill.h"

namespace kvmill::python {

// An error of the C ABI on its way to Python: one of kvmill's exceptions.
struct Failure {
  kvmill_code code;
  std::string message;
};

[[noreturn]] void Invalid(const std::string& message);

// Which array of a call it is, for errors; made for thousands of arrays that are right.
struct Place {
  std::size_t block;
  std::size_t layer;
  const char* what;
};
// "block 3, layer 0: k: " and `message`.
std::string At(const Place& place, const std::string& message);
[[noreturn]] void Invalid(const Place& place, const std::string& message);

// DLPack's structs, as their ABI has them (dlpack.h, before version 1).
struct DlDevice {
  std::int32_t type;  // 1: CPU, 3: host memory that CUDA knows.
  std::int32_t id;
};
struct DlType {
  std::uint8_t code;  // 1: unsigned, 2: IEEE float, 4: bfloat.
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // In elements; null: C order.
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor* self);
};

// What keeps memory of Python objects alive and in place. Movable.
class Pins {
 public:
  Pins() = default;
  Pins(Pins&& other) noexcept;
  Pins& operator=(Pins&&) = delete;
  ~Pins();

  const Py_buffer& AddBuffer(PyObject* object, int flags);  // Throws error_already_set.
  void AddTensor(DlManagedTensor* tensor) { tensors_.push_back(tensor); }

 private:
  std::vector<Py_buffer*> buffers_;
  std::vector<DlManagedTensor*> tensors_;
};

enum class Kind { kFloat16, kBFloat16, kBits16 };

// 16-bit values in memory.
struct Array {
  std::byte* data = nullptr;
  Kind kind = Kind::kBits16;
  std::vector<std::ptrdiff_t> shape;
  std::vector<std::ptrdiff_t> strides;  // In bytes.
};

// The memory of an object that has the buffer protocol or __dlpack__, pinned. uint16 arrays are
// taken as bits of either type, arrays of ml_dtypes' bfloat16 as what they are. Throws type_error
// for what is not an array, Failure for one of another type, device or byte order.
Array ToArray(pybind11::handle object, bool writable, const Place& place, Pins* pins);

// The bytes of an object that has the buffer protocol, in C order.
const Py_buffer& ToBytes(pybind11::handle object, bool writable, const Place& place, Pins* pins);

// A DLPack capsule of an array, which keeps it alive: of bytes for the code of unsigned, else of
// 16-bit values. `code` as in DlType. `read_only`: also of memory that must not be written.
pybind11::capsule ToDlpack(pybind11::handle object, std::uint8_t code, bool read_only);

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_ARRAYS_H_
