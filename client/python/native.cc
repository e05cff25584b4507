// kvmill._native: the C ABI (client/kvmill.h and its like) for the Python package, with Python's
// memory kept in place while an operation uses it. Python code turns its tuples into what users
// see.
#include "client/python/native.h"

#include <pybind11/stl.h>

namespace kvmill::python {

py::tuple Namespace::SpecTuple() const {
  py::list groups;
  for (std::size_t g = 0; g < spec_.group_count; ++g) {
    const kvmill_layer_group& group = spec_.groups[g];
    py::list layers;
    for (std::size_t l = 0; l < group.layer_count; ++l) layers.append(group.layers[l]);
    groups.append(py::make_tuple(layers, group.kv_heads, group.head_dim, group.attention,
                                 group.window_tokens));
  }
  return py::make_tuple(groups, spec_.model, spec_.revision, spec_.adapter_digest, spec_.salt,
                        spec_.hash_scheme, spec_.source_dtype, spec_.block_tokens, spec_.key_bits,
                        spec_.value_bits, spec_.frame, spec_.sink_blocks);
}

void CheckText(const std::string& text, const char* what) {
  if (text.find('\0') != std::string::npos) Invalid(std::string(what) + " with a zero character");
}

void SetIdentity(const std::string& address, const std::vector<std::string>& identity,
                 kvmill_client_options* options) {
  CheckText(address, "an address");
  if (identity.size() != 5) Invalid("an identity that is not of five texts");
  for (const std::string& text : identity) CheckText(text, "an identity");
  options->address = address.c_str();
  options->tls_ca = identity[0].c_str();
  options->tls_certificate = identity[1].c_str();
  options->tls_key = identity[2].c_str();
  options->tls_server_name = identity[3].c_str();
  options->token = identity[4].c_str();
}

namespace {

// A contextvars.ContextVar of (id, traceparent, tracestate), or of None. Of the module, as long as
// the process.
PyObject* request_variable = nullptr;

}  // namespace

CurrentRequest::CurrentRequest() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(request_variable, nullptr, &value) != 0) throw py::error_already_set();
  if (value == nullptr) return;
  const auto object = py::reinterpret_steal<py::object>(value);
  if (!object.is_none()) texts_ = object.cast<std::vector<std::string>>();
}

void CurrentRequest::AddTo(kvmill_call_options* call) const {
  if (texts_.size() != 3) return;
  call->request_id = texts_[0].c_str();
  call->traceparent = texts_[1].c_str();
  call->tracestate = texts_[2].c_str();
}

namespace {

py::bytes TailKeyOf(const py::bytes& parent, const py::object& token_count, const py::bytes& key) {
  const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(parent, key));
  std::uint8_t out[32];
  Need(kvmill_tail_key(keys[0], ToInt<std::uint32_t>(token_count, "token_count"), keys[1], out));
  return py::bytes(reinterpret_cast<const char*>(out), sizeof(out));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The C ABI of kvmill; use the package kvmill.";
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Failure& failure) {
      const py::object error =
          py::module_::import("kvmill._errors").attr("error_of")(failure.code, failure.message, 0);
      PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    }
  });
  m.def("abi_version", &kvmill_abi_version);
  m.def("version", &kvmill_version);
  m.def("tail_key", &TailKeyOf);
  m.def("to_dlpack", &ToDlpack);
  py::class_<Namespace, std::shared_ptr<Namespace>>(m, "Namespace")
      .def_property_readonly("name",
                             [](const Namespace& n) { return kvmill_namespace_name(n.get()); })
      .def_property_readonly(
          "fingerprint", [](const Namespace& n) { return kvmill_namespace_fingerprint(n.get()); })
      .def_property_readonly("layer_count", &Namespace::layer_count)
      .def("spec", &Namespace::SpecTuple)
      .def("record_bytes",
           [](const Namespace& n, const py::object& layer) {
             return kvmill_namespace_record_bytes(n.get(), ToInt<std::size_t>(layer, "layer"));
           })
      .def("page_bytes_max", [](const Namespace& n, const py::object& layer) {
        return kvmill_namespace_page_bytes_max(n.get(), ToInt<std::size_t>(layer, "layer"));
      });
  py::class_<Queue>(m, "Queue")
      .def(py::init<>())
      .def_property_readonly("fd", &Queue::fd)
      .def_property_readonly("running", &Queue::running)
      .def("take", &Queue::Take);
  request_variable = PyContextVar_New("kvmill.request", Py_None);
  if (request_variable == nullptr) throw py::error_already_set();
  m.attr("request") = py::reinterpret_borrow<py::object>(request_variable);
  AddEngine(m);
  AddWatch(m);
  AddMapped(m);
  AddClient(m);
}

}  // namespace kvmill::python
