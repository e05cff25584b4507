// Arguments that are arrays, pages or numbers, checked.
#include <algorithm>
#include <type_traits>

#include "client/python/native.h"

namespace kvmill::python {
namespace {

// Checks an array of [..., heads, head_dim] against the layer it is of.
void CheckArray(const Array& array, const kvmill_layer_group& group, std::uint32_t heads,
                std::uint32_t dtype, bool writable, std::size_t ndim, const Place& place) {
  if (array.shape.size() != ndim) {
    Invalid(place,
            "" + std::to_string(array.shape.size()) + " dimensions, want " + std::to_string(ndim));
  }
  const std::ptrdiff_t got_heads = array.shape[ndim - 2], got_dim = array.shape[ndim - 1];
  if (got_heads != static_cast<std::ptrdiff_t>(heads) ||
      got_dim != static_cast<std::ptrdiff_t>(group.head_dim)) {
    Invalid(place, "" + std::to_string(got_heads) + " heads of " + std::to_string(got_dim) +
                       " channels, want " + std::to_string(heads) + " of " +
                       std::to_string(group.head_dim));
  }
  if (array.strides[ndim - 1] != 2) {
    Invalid(place, "the channels of a head must be adjacent; their distance is " +
                       std::to_string(array.strides[ndim - 1]) + " bytes");
  }
  const Kind want = dtype == KVMILL_BFLOAT16 ? Kind::kBFloat16 : Kind::kFloat16;
  if (array.kind != Kind::kBits16 && array.kind != want) {
    Invalid(place, std::string(want == Kind::kFloat16 ? "bfloat16" : "float16") +
                       " values, the namespace has the other type");
  }
  for (std::size_t i = 0; writable && i + 1 < ndim; ++i) {
    if (array.shape[i] > 1 && array.strides[i] == 0) Invalid(place, "its elements overlap");
  }
}

std::string TextOf(py::handle value) {
  PyObject* const text = PyObject_Str(value.ptr());
  if (text == nullptr) {  // Python refuses to write down numbers of thousands of digits.
    PyErr_Clear();
    return "of too many digits";
  }
  return py::reinterpret_steal<py::str>(text).cast<std::string>();
}

// The integer that `value` is. Throws type_error.
py::object IndexOf(py::handle value, const char* what) {
  PyObject* const index = PyNumber_Index(value.ptr());
  if (index != nullptr) return py::reinterpret_steal<py::object>(index);
  PyErr_Clear();
  throw py::type_error(std::string(what) + ": a " + Py_TYPE(value.ptr())->tp_name +
                       " is not an integer");
}

}  // namespace

std::int64_t ToSigned(py::handle value, const char* what, std::int64_t least, std::int64_t most) {
  const py::object index = IndexOf(value, what);
  int overflow = 0;
  const std::int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || number < least || number > most) {
    Invalid(std::string(what) + " " + TextOf(index) + ", want " + std::to_string(least) + " to " +
            std::to_string(most));
  }
  return number;
}

std::uint64_t ToUnsigned(py::handle value, const char* what, std::uint64_t most) {
  const py::object index = IndexOf(value, what);
  const std::uint64_t number = PyLong_AsUnsignedLongLong(index.ptr());
  const bool wrong = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  if (wrong || number > most) {
    Invalid(std::string(what) + " " + TextOf(index) + ", want 0 to " + std::to_string(most));
  }
  return number;
}

// K or V: an array [tokens, heads, head_dim], or a tuple (array [pages, page_tokens, heads,
// head_dim], page numbers). View: kvmill_kv or kvmill_mutable_kv.
template <typename View>
View ToView(py::handle object, const Namespace& ns, std::size_t layer, std::uint32_t heads,
            std::uint32_t tokens, bool writable, const Place& place, Pending* pending) {
  const kvmill_layer_group& group = ns.group_of(layer);
  const std::uint32_t dtype = ns.spec().source_dtype;
  View view = {};
  std::ptrdiff_t room = 0;
  if (!py::isinstance<py::tuple>(object)) {
    const Array array = ToArray(object, writable, place, &pending->pins);
    CheckArray(array, group, heads, dtype, writable, 3, place);
    view.data = array.data;
    view.token_stride_bytes = array.strides[0];
    view.head_stride_bytes = array.strides[1];
    room = array.shape[0];
  } else {
    const auto paged = py::reinterpret_borrow<py::tuple>(object);
    if (paged.size() != 2) throw py::type_error(At(place, "want (cache, pages)"));
    const Array cache = ToArray(paged[0], writable, place, &pending->pins);
    CheckArray(cache, group, heads, dtype, writable, 4, place);
    std::vector<void*>& pages = pending->pages.emplace_back();
    for (const py::handle number : py::cast<py::sequence>(paged[1])) {
      const std::ptrdiff_t page = ToSigned(number, "page", PTRDIFF_MIN, PTRDIFF_MAX);
      if (page < 0 || page >= cache.shape[0]) {
        Invalid(place, "page " + std::to_string(page) + ", the cache has " +
                           std::to_string(cache.shape[0]));
      }
      pages.push_back(cache.data + page * cache.strides[0]);
    }
    view.pages = pages.data();
    view.page_tokens = static_cast<std::uint32_t>(cache.shape[1]);
    view.token_stride_bytes = cache.strides[1];
    view.head_stride_bytes = cache.strides[2];
    room = static_cast<std::ptrdiff_t>(pages.size()) * cache.shape[1];
  }
  if (room < static_cast<std::ptrdiff_t>(tokens) || room <= 0) {
    constexpr bool is_store = std::is_same_v<View, kvmill_kv>;
    Invalid(place,
            "room for " + std::to_string(room) + " tokens, want " + std::to_string(tokens) +
                (is_store && room > 0 ? "; token_count says how many a block has that is not full"
                                      : ""));
  }
  view.tokens = static_cast<std::uint32_t>(std::min<std::ptrdiff_t>(room, UINT32_MAX));
  return view;
}

template kvmill_kv ToView(py::handle, const Namespace&, std::size_t, std::uint32_t, std::uint32_t,
                          bool, const Place&, Pending*);
template kvmill_mutable_kv ToView(py::handle, const Namespace&, std::size_t, std::uint32_t,
                                  std::uint32_t, bool, const Place&, Pending*);

std::vector<kvmill_key> ToKeys(const py::sequence& keys) {
  std::vector<kvmill_key> views;
  for (const py::handle key : keys) {
    if (!PyBytes_Check(key.ptr())) throw py::type_error("a block key must be bytes");
    views.push_back(
        {PyBytes_AS_STRING(key.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(key.ptr()))});
  }
  return views;
}

}  // namespace kvmill::python
