#include "client/python/arrays.h"

#include <memory>
#include <utility>

namespace py = pybind11;

namespace kvmill::python {
namespace {

constexpr std::uint8_t kUnsigned = 1, kFloat = 2, kBfloat = 4;

Array FromBuffer(const Py_buffer& buffer, const Place& place) {
  std::string format = buffer.format == nullptr ? "B" : buffer.format;
  if (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@')) {
    format.erase(0, 1);
  }
  Array array;
  if (format == "e") {
    array.kind = Kind::kFloat16;
  } else if (format == "H") {
    array.kind = Kind::kBits16;
  } else {
    Invalid(place, "elements of format '" + format + "', want float16, bfloat16 or uint16");
  }
  array.data = static_cast<std::byte*>(buffer.buf);
  array.shape.assign(buffer.shape, buffer.shape + buffer.ndim);
  array.strides.assign(buffer.strides, buffer.strides + buffer.ndim);
  return array;
}

Array FromTensor(const DlTensor& tensor, const Place& place) {
  if (tensor.device.type != 1 && tensor.device.type != 3) {
    Invalid(place,
            "is on a device of type " + std::to_string(tensor.device.type) + ", want host memory");
  }
  if (tensor.dtype.bits != 16 || tensor.dtype.lanes != 1) {
    Invalid(place, "elements of " + std::to_string(tensor.dtype.bits) + " bits, want 16");
  }
  Array array;
  switch (tensor.dtype.code) {
    case kUnsigned:
      array.kind = Kind::kBits16;
      break;
    case kFloat:
      array.kind = Kind::kFloat16;
      break;
    case kBfloat:
      array.kind = Kind::kBFloat16;
      break;
    default:
      Invalid(place, "elements of DLPack's type " + std::to_string(tensor.dtype.code) +
                         ", want float16, bfloat16 or uint16");
  }
  array.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  array.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  array.strides.resize(array.shape.size());
  std::ptrdiff_t adjacent = 2;
  for (std::size_t i = array.shape.size(); i-- > 0; adjacent *= array.shape[i]) {
    array.strides[i] = tensor.strides == nullptr ? adjacent : 2 * tensor.strides[i];
  }
  return array;
}

// An array of ml_dtypes' bfloat16: the buffer protocol has no name for it, but its bits do.
bool IsBfloat16(py::handle object) {
  if (!py::hasattr(object, "dtype") || !py::hasattr(object, "view")) return false;
  const py::object dtype = object.attr("dtype");
  return py::hasattr(dtype, "name") &&
         py::str(dtype.attr("name")).cast<std::string>() == "bfloat16";
}

struct Exported {
  DlManagedTensor managed = {};
  Py_buffer buffer = {};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

}  // namespace

void Invalid(const std::string& message) { throw Failure{KVMILL_INVALID_ARGUMENT, message}; }

std::string At(const Place& place, const std::string& message) {
  return "block " + std::to_string(place.block) + ", layer " + std::to_string(place.layer) + ": " +
         place.what + ": " + message;
}

void Invalid(const Place& place, const std::string& message) { Invalid(At(place, message)); }

Pins::Pins(Pins&& other) noexcept
    : buffers_(std::move(other.buffers_)), tensors_(std::move(other.tensors_)) {
  other.buffers_.clear();
  other.tensors_.clear();
}

Pins::~Pins() {
  for (Py_buffer* buffer : buffers_) {
    PyBuffer_Release(buffer);
    delete buffer;
  }
  for (DlManagedTensor* tensor : tensors_) {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
}

const Py_buffer& Pins::AddBuffer(PyObject* object, int flags) {
  auto buffer = std::make_unique<Py_buffer>();
  buffers_.reserve(buffers_.size() + 1);
  if (PyObject_GetBuffer(object, buffer.get(), flags) != 0) throw py::error_already_set();
  buffers_.push_back(buffer.release());
  return *buffers_.back();
}

Array ToArray(py::handle object, bool writable, const Place& place, Pins* pins) {
  std::string refused;
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    try {
      return FromBuffer(pins->AddBuffer(object.ptr(), flags), place);
    } catch (py::error_already_set& error) {
      refused = std::string(py::str(error.value()));
    }
  }
  if (IsBfloat16(object)) {
    Array array = ToArray(object.attr("view")("uint16"), writable, place, pins);
    array.kind = Kind::kBFloat16;
    return array;
  }
  if (!refused.empty()) Invalid(place, refused);
  if (!py::hasattr(object, "__dlpack__")) {
    throw py::type_error(At(place, "a " + std::string(Py_TYPE(object.ptr())->tp_name) +
                                       " has neither the buffer protocol nor __dlpack__"));
  }
  const auto device = py::cast<py::tuple>(object.attr("__dlpack_device__")());
  DlTensor where = {};
  where.device.type = device[0].cast<std::int32_t>();
  where.dtype = {kUnsigned, 16, 1};
  static_cast<void>(FromTensor(where, place));  // Asking a device for a capsule may take long.
  const auto capsule = py::cast<py::object>(object.attr("__dlpack__")());
  auto* const managed =
      static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  // It is ours from here on.
  pins->AddTensor(managed);
  if (PyCapsule_SetName(capsule.ptr(), "used_dltensor") != 0) throw py::error_already_set();
  return FromTensor(managed->tensor, place);
}

const Py_buffer& ToBytes(py::handle object, bool writable, const Place& place, Pins* pins) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    throw py::type_error(At(place, "a " + std::string(Py_TYPE(object.ptr())->tp_name) +
                                       " does not have the buffer protocol"));
  }
  try {
    return pins->AddBuffer(object.ptr(),
                           PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0));
  } catch (py::error_already_set& error) {
    Invalid(place, "" + std::string(py::str(error.value())));
  }
}

py::capsule ToDlpack(py::handle object, std::uint8_t code, bool read_only) {
  auto exported = std::make_unique<Exported>();
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (read_only ? 0 : PyBUF_WRITABLE);
  const std::ptrdiff_t element_bytes = code == kUnsigned ? 1 : 2;
  if (PyObject_GetBuffer(object.ptr(), &exported->buffer, flags) != 0) {
    throw py::error_already_set();
  }
  const Py_buffer& buffer = exported->buffer;
  if (buffer.itemsize != element_bytes) {
    const std::string got = std::to_string(buffer.itemsize);
    PyBuffer_Release(&exported->buffer);
    Invalid("elements of " + got + " bytes, want " + std::to_string(element_bytes));
  }
  for (int i = 0; i < buffer.ndim; ++i) {
    exported->shape.push_back(buffer.shape[i]);
    exported->strides.push_back(buffer.strides[i] / element_bytes);
  }
  DlManagedTensor& managed = exported->managed;
  managed.tensor.data = buffer.buf;
  managed.tensor.device = {1, 0};
  managed.tensor.ndim = buffer.ndim;
  managed.tensor.dtype = {code, static_cast<std::uint8_t>(8 * element_bytes), 1};
  managed.tensor.shape = exported->shape.data();
  managed.tensor.strides = exported->strides.data();
  managed.context = exported.get();
  managed.deleter = [](DlManagedTensor* self) {
    const PyGILState_STATE state = PyGILState_Ensure();  // The consumer calls from where it likes.
    auto* const owner = static_cast<Exported*>(self->context);
    PyBuffer_Release(&owner->buffer);
    delete owner;
    PyGILState_Release(state);
  };
  PyObject* const capsule = PyCapsule_New(&managed, "dltensor", [](PyObject* unused) {
    if (PyCapsule_IsValid(unused, "dltensor") == 0) return;  // Somebody took it.
    auto* const self = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
    self->deleter(self);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(exported.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace kvmill::python
