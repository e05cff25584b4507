// Readers of events, and what comes out of their queues.
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/python/watch.h"

namespace kvmill::python {
namespace {

py::bytes BytesOf(const kvmill_key& key) {
  return py::bytes(static_cast<const char*>(key.data), key.bytes);
}

class Watch {
 public:
  // Batches, and at the end one event that has none, come out of `queue`.
  Watch(const std::string& address, const std::vector<std::string>& identity,
        const std::string& namespace_name, const std::string& epoch, const py::object& sequence,
        bool snapshot, Queue& queue) {
    auto daemon = Init<kvmill_client_options>();
    SetIdentity(address, identity, &daemon);
    CheckText(namespace_name, "a name");
    CheckText(epoch, "an epoch");
    auto options = Init<kvmill_watch_options>();
    options.namespace_name = namespace_name.c_str();
    options.epoch = epoch.c_str();
    options.sequence = ToInt<std::uint64_t>(sequence, "sequence");
    options.no_snapshot = snapshot ? 0 : 1;
    auto pending = std::make_unique<Pending>();
    const auto tag = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pending.get()));
    Need(kvmill_watch_open(&daemon, &options, queue.get(), tag, &watch_));
    static_cast<void>(pending.release());  // Whoever takes the last event has it now.
  }
  ~Watch() { Close(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // As Client::Close.
  void Close() {
    kvmill_watch* const watch = std::exchange(watch_, nullptr);
    if (watch == nullptr) return;
    const py::gil_scoped_release release;
    static_cast<void>(kvmill_watch_close(watch));
  }
  bool closed() const { return watch_ == nullptr; }
  std::string trouble() const {
    char text[1024] = "";
    if (watch_ != nullptr) Need(kvmill_watch_trouble(watch_, text, sizeof(text)));
    return text;
  }

 private:
  kvmill_watch* watch_ = nullptr;
};

}  // namespace

py::tuple WatchBatchOf(const kvmill_result* result) {
  auto batch = Init<kvmill_watch_batch>();
  Need(kvmill_result_watch(result, &batch));
  std::map<const kvmill_watched_namespace*, std::size_t> indices;
  py::list namespaces, events;
  for (std::size_t i = 0; i < batch.event_count; ++i) {
    auto event = Init<kvmill_watched_event>();
    Need(kvmill_result_watched(result, i, &event));
    const auto [index, added] = indices.try_emplace(event.ns, indices.size());
    if (added) {
      const kvmill_watched_namespace& ns = *event.ns;
      namespaces.append(py::make_tuple(ns.name, ns.fingerprint, ns.model, ns.adapter_digest,
                                       ns.hash_scheme, ns.block_tokens));
    }
    events.append(py::make_tuple(event.what, index->second, BytesOf(event.key),
                                 BytesOf(event.parent), event.tier, event.from_tier,
                                 event.token_count));
  }
  py::object epoch = py::none();
  if (batch.epoch != nullptr) epoch = py::str(batch.epoch);
  return py::make_tuple(batch.snapshot_begin != 0, batch.snapshot_end != 0, epoch, batch.sequence,
                        namespaces, events);
}

void AddWatch(py::module_& m) {
  py::class_<Watch>(m, "Watch")
      .def(py::init<const std::string&, const std::vector<std::string>&, const std::string&,
                    const std::string&, const py::object&, bool, Queue&>(),
           py::keep_alive<1, 8>())
      .def("close", &Watch::Close)
      .def_property_readonly("closed", &Watch::closed)
      .def_property_readonly("trouble", &Watch::trouble);
}

}  // namespace kvmill::python
