// The C ABI's objects as Python's: what the parts of kvmill._native share. Internal to
// client/python. Everything here wants the GIL.
#ifndef KVMILL_CLIENT_PYTHON_NATIVE_H_
#define KVMILL_CLIENT_PYTHON_NATIVE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/kvmill.h"
#include "client/python/arrays.h"

namespace kvmill::python {

namespace py = pybind11;

inline void Need(kvmill_code code) {
  if (code != KVMILL_OK) throw Failure{code, kvmill_last_error()};
}

template <typename T>
T Init() {
  T value;
  KVMILL_INIT(&value);
  return value;
}

// An integer of Python's: TypeError for what is none, else a ValueError that names `what` and the
// limits.
std::int64_t ToSigned(py::handle value, const char* what, std::int64_t least, std::int64_t most);
std::uint64_t ToUnsigned(py::handle value, const char* what, std::uint64_t most);
template <typename T>
T ToInt(py::handle value, const char* what) {
  return static_cast<T>(ToUnsigned(value, what, std::numeric_limits<T>::max()));
}

// What an operation borrows; its address is the operation's tag. Whoever takes the event frees it.
struct Pending {
  Pins pins;
  std::vector<std::vector<void*>> pages;
  std::vector<py::object> kept;
};

class Namespace {
 public:
  explicit Namespace(kvmill_namespace* ns) : ns_(ns), spec_(Init<kvmill_namespace_spec>()) {
    Need(kvmill_namespace_get_spec(ns, &spec_));
    for (std::size_t g = 0; g < spec_.group_count; ++g) {
      layer_groups_.insert(layer_groups_.end(), spec_.groups[g].layer_count, &spec_.groups[g]);
    }
  }
  ~Namespace() { kvmill_namespace_free(ns_); }
  Namespace(const Namespace&) = delete;
  Namespace& operator=(const Namespace&) = delete;

  const kvmill_namespace* get() const { return ns_; }
  const kvmill_namespace_spec& spec() const { return spec_; }
  std::size_t layer_count() const { return layer_groups_.size(); }
  const kvmill_layer_group& group_of(std::size_t layer) const { return *layer_groups_[layer]; }

  py::tuple SpecTuple() const;

 private:
  kvmill_namespace* const ns_;
  kvmill_namespace_spec spec_;
  std::vector<const kvmill_layer_group*> layer_groups_;
};

class Queue {
 public:
  Queue() { Need(kvmill_queue_create(&queue_)); }
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  kvmill_queue* get() const { return queue_; }
  int fd() const { return kvmill_queue_fd(queue_); }
  std::size_t running() const { return kvmill_queue_running(queue_); }

  // (tag, code, message, retry_after_ms, value, whether more come with that tag) of the next event;
  // None when none came.
  py::object Take(std::int64_t timeout_ms);

 private:
  kvmill_queue* queue_ = nullptr;
};

// C strings end at a zero character: two texts must not become one. INVALID_ARGUMENT names `what`.
void CheckText(const std::string& text, const char* what);
// Where a daemon is and who this is: ca, certificate, key, server name, token, each may be empty.
// `options` points into both.
void SetIdentity(const std::string& address, const std::vector<std::string>& identity,
                 kvmill_client_options* options);

// What the context of this thread or task says of the request that it works for (see the package's
// `request`), while a call is started.
class CurrentRequest {
 public:
  CurrentRequest();
  void AddTo(kvmill_call_options* call) const;  // Points into this.

 private:
  std::vector<std::string> texts_;  // Id, traceparent, tracestate; none: nothing.
};

// K or V of a block as View (kvmill_kv, kvmill_mutable_kv): an array [tokens, heads, head_dim], or
// a tuple (array [pages, page_tokens, heads, head_dim], page numbers).
template <typename View>
View ToView(py::handle object, const Namespace& ns, std::size_t layer, std::uint32_t heads,
            std::uint32_t tokens, bool writable, const Place& place, Pending* pending);

// Keys are bytes objects, which `keys` keeps alive while the views are used.
std::vector<kvmill_key> ToKeys(const py::sequence& keys);

// Blocks in the daemon's memory; what is read through it keeps it alive.
std::shared_ptr<class Mapped> MappedOf(const kvmill_result* result);

void AddClient(py::module_& m);
void AddEngine(py::module_& m);
void AddMapped(py::module_& m);
void AddWatch(py::module_& m);

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_NATIVE_H_
