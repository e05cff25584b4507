// kvmill._native: the C ABI (client/kvmill.h) for the Python package, with Python's memory kept in
// place while an operation uses it. Python code turns its tuples into what users see.
#include <memory>
#include <utility>

#include "client/python/arrays.h"

namespace py = pybind11;

namespace kvmill::python {
namespace {

// How often a waiting call looks for signals (Ctrl-C).
constexpr std::int64_t kSignalMs = 100;

void Need(kvmill_code code) {
  if (code != KVMILL_OK) throw Failure{code, kvmill_last_error()};
}

template <typename T>
T Init() {
  T value;
  KVMILL_INIT(&value);
  return value;
}

// What an operation borrows; its address is the operation's tag. Whoever takes the event frees it.
struct Pending {
  Pins pins;
  std::vector<std::vector<void*>> pages;
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

  py::tuple SpecTuple() const {
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

 private:
  kvmill_namespace* const ns_;
  kvmill_namespace_spec spec_;
  std::vector<const kvmill_layer_group*> layer_groups_;
};

std::shared_ptr<Namespace> NamespaceOf(const kvmill_result* result) {
  kvmill_namespace* ns = nullptr;
  Need(kvmill_result_namespace(result, &ns));
  return std::make_shared<Namespace>(ns);
}

py::tuple LookupOf(const kvmill_result* result) {
  auto lookup = Init<kvmill_lookup_result>();
  Need(kvmill_result_lookup(result, &lookup));
  return py::make_tuple(
      lookup.hit_blocks, lookup.hit_tokens,
      py::bytes(reinterpret_cast<const char*>(lookup.tiers), lookup.hit_blocks), lookup.tail_tokens,
      py::bytes(static_cast<const char*>(lookup.tail_key.data), lookup.tail_key.bytes));
}

py::list BlocksOf(const kvmill_result* result, std::uint64_t count) {
  py::list blocks;
  for (std::uint64_t i = 0; i < count; ++i) {
    auto block = Init<kvmill_block_result>();
    Need(kvmill_result_block(result, i, &block));
    blocks.append(py::make_tuple(block.code, block.message, block.retry_after_ms, block.outcome,
                                 block.tier, block.token_count));
  }
  return blocks;
}

py::tuple StoreOf(const kvmill_result* result) {
  auto store = Init<kvmill_store_result>();
  Need(kvmill_result_store(result, &store));
  return py::make_tuple(BlocksOf(result, store.block_count), store.blocks_stored,
                        store.blocks_existing, store.blocks_failed, store.raw_bytes,
                        store.stored_bytes, store.tile_bytes, store.tile_raw_bytes,
                        store.raw_heads);
}

py::tuple FetchOf(const kvmill_result* result) {
  auto fetch = Init<kvmill_fetch_result>();
  Need(kvmill_result_fetch(result, &fetch));
  py::list page_bytes;  // Per block; empty unless pages were fetched.
  for (std::uint64_t block = 0; block < fetch.block_count; ++block) {
    py::list layers;
    std::size_t bytes = 0;
    for (std::size_t l = 0; kvmill_result_page_bytes(result, block, l, &bytes) == KVMILL_OK; ++l) {
      layers.append(bytes);
    }
    page_bytes.append(layers);
  }
  return py::make_tuple(BlocksOf(result, fetch.block_count), fetch.page_bytes, page_bytes);
}

py::tuple StatOf(const kvmill_result* result) {
  auto stat = Init<kvmill_stat_result>();
  Need(kvmill_result_stat(result, &stat));
  py::list tiers;
  for (std::uint64_t i = 0; i < stat.tier_count; ++i) {
    auto usage = Init<kvmill_tier_usage>();
    Need(kvmill_result_tier(result, i, &usage));
    tiers.append(py::make_tuple(usage.tier, usage.used_bytes, usage.capacity_bytes, usage.blocks));
  }
  return py::make_tuple(stat.blocks, stat.pages, stat.sessions, stat.leases, tiers,
                        stat.raw_bytes_ingested, stat.encoded_bytes_stored, stat.lookup_blocks,
                        stat.hit_blocks, stat.checksum_failures, stat.unwritten_blocks,
                        stat.metadata_bytes, stat.boot_id, stat.uptime_s);
}

py::object ValueOf(kvmill_operation operation, const kvmill_result* result) {
  switch (operation) {
    case KVMILL_OPEN_NAMESPACE:
    case KVMILL_FIND_NAMESPACE:
      return py::cast(NamespaceOf(result));
    case KVMILL_LOOKUP:
      return LookupOf(result);
    case KVMILL_STORE:
      return StoreOf(result);
    case KVMILL_FETCH:
      return FetchOf(result);
    case KVMILL_STAT:
      return StatOf(result);
    default:
      std::uint64_t count = 0;
      Need(kvmill_result_count(result, &count));
      return py::int_(count);
  }
}

class Queue {
 public:
  Queue() { Need(kvmill_queue_create(&queue_)); }
  ~Queue() {
    // Its operations have ended: their client is closed first. If not, this waits for them.
    {
      const py::gil_scoped_release release;
      static_cast<void>(kvmill_queue_drain(queue_, -1));
    }
    auto event = Init<kvmill_event>();
    while (kvmill_queue_next(queue_, 0, &event) == KVMILL_OK) {
      delete reinterpret_cast<Pending*>(event.tag);
      kvmill_result_free(event.result);
    }
    static_cast<void>(kvmill_queue_destroy(queue_));
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  kvmill_queue* get() const { return queue_; }
  int fd() const { return kvmill_queue_fd(queue_); }
  std::size_t running() const { return kvmill_queue_running(queue_); }

  // (tag, code, message, retry_after_ms, value) of the next event; None when none came.
  py::object Take(std::int64_t timeout_ms) {
    auto event = Init<kvmill_event>();
    kvmill_code code = KVMILL_OK;
    for (;;) {
      const std::int64_t wait = timeout_ms < 0 || timeout_ms > kSignalMs ? kSignalMs : timeout_ms;
      if (wait == 0) {
        code = kvmill_queue_next(queue_, 0, &event);
      } else {
        const py::gil_scoped_release release;
        code = kvmill_queue_next(queue_, wait, &event);
      }
      if (code == KVMILL_OK) break;
      if (code != KVMILL_DEADLINE_EXCEEDED) Need(code);
      if (timeout_ms >= 0 && (timeout_ms -= wait) <= 0) return py::none();
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    const std::unique_ptr<kvmill_result, void (*)(kvmill_result*)> result(event.result,
                                                                          &kvmill_result_free);
    const std::uint64_t tag = event.tag;
    delete reinterpret_cast<Pending*>(tag);
    py::object value = py::none();
    if (event.code == KVMILL_OK) value = ValueOf(event.operation, result.get());
    return py::make_tuple(tag, event.code, kvmill_result_message(result.get()),
                          event.retry_after_ms, value);
  }

 private:
  kvmill_queue* queue_ = nullptr;
};

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
      const auto page = number.cast<std::ptrdiff_t>();
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
    Invalid(place, "room for " + std::to_string(room) + " tokens, want " + std::to_string(tokens));
  }
  view.tokens = static_cast<std::uint32_t>(std::min<std::ptrdiff_t>(room, UINT32_MAX));
  return view;
}

std::uint32_t HeadsOf(const Namespace& ns, std::size_t layer, std::uint32_t head_count) {
  return head_count == 0 ? ns.group_of(layer).kv_heads : head_count;
}

// Keys are bytes objects, which `keys` keeps alive while the views are used.
std::vector<kvmill_key> ToKeys(const py::sequence& keys) {
  std::vector<kvmill_key> views;
  for (const py::handle key : keys) {
    if (!PyBytes_Check(key.ptr())) throw py::type_error("a block key must be bytes");
    views.push_back(
        {PyBytes_AS_STRING(key.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(key.ptr()))});
  }
  return views;
}

// C strings end at a zero character: two names must not become one.
void CheckName(const std::string& name) {
  if (name.find('\0') != std::string::npos) Invalid("a name with a zero character");
}

class Client {
 public:
  Client(const std::string& address, std::uint64_t timeout_ms) {
    if (address.find('\0') != std::string::npos) Invalid("an address with a zero character");
    auto options = Init<kvmill_client_options>();
    options.address = address.c_str();
    options.timeout_ms = timeout_ms;
    Need(kvmill_client_create(&options, &client_));
  }
  ~Client() { Close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Everything that runs has ended, and its events are in their queues, when this returns. The
  // handle is taken under the GIL: no other thread starts anything on it afterwards.
  void Close() {
    kvmill_client* const client = std::exchange(client_, nullptr);
    if (client == nullptr) return;
    const py::gil_scoped_release release;
    static_cast<void>(kvmill_client_destroy(client));
  }
  bool closed() const { return client_ == nullptr; }

  std::string boot_id() const {
    char text[65];
    Need(kvmill_client_boot_id(get(), text, sizeof(text)));
    return text;
  }

  std::uint64_t OpenNamespace(Queue& queue, const std::string& name, const py::tuple& spec,
                              std::uint64_t timeout_ms) {
    std::vector<kvmill_layer_group> groups;
    std::vector<std::vector<std::uint16_t>> layers;
    for (const py::handle item : py::cast<py::sequence>(spec[0])) {
      const auto from = py::cast<py::tuple>(item);
      auto group = Init<kvmill_layer_group>();
      std::vector<std::uint16_t>& numbers = layers.emplace_back();
      for (const py::handle layer : py::cast<py::sequence>(from[0])) {
        numbers.push_back(layer.cast<std::uint16_t>());
      }
      group.layers = numbers.data();  // Of a vector that moves, not its elements.
      group.layer_count = numbers.size();
      group.kv_heads = from[1].cast<std::uint32_t>();
      group.head_dim = from[2].cast<std::uint32_t>();
      group.attention = from[3].cast<std::uint32_t>();
      group.window_tokens = from[4].cast<std::uint32_t>();
      groups.push_back(group);
    }
    std::vector<std::string> texts;
    for (std::size_t i = 1; i <= 5; ++i) {
      texts.push_back(spec[i].cast<std::string>());
      if (texts.back().find('\0') != std::string::npos) Invalid("a text with a zero character");
    }
    CheckName(name);
    auto to = Init<kvmill_namespace_spec>();
    to.groups = groups.data();
    to.group_count = groups.size();
    to.model = texts[0].c_str();
    to.revision = texts[1].c_str();
    to.adapter_digest = texts[2].c_str();
    to.salt = texts[3].c_str();
    to.hash_scheme = texts[4].c_str();
    to.source_dtype = spec[6].cast<std::uint32_t>();
    to.block_tokens = spec[7].cast<std::uint32_t>();
    to.key_bits = spec[8].cast<std::uint32_t>();
    to.value_bits = spec[9].cast<std::uint32_t>();
    to.frame = spec[10].cast<std::uint32_t>();
    to.sink_blocks = spec[11].cast<std::uint32_t>();
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_open_namespace(get(), name.c_str(), &to, call, queue.get(), tag);
    });
  }

  std::uint64_t FindNamespace(Queue& queue, const std::string& name, std::uint64_t timeout_ms) {
    CheckName(name);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_find_namespace(get(), name.c_str(), call, queue.get(), tag);
    });
  }

  std::uint64_t Lookup(Queue& queue, const Namespace& ns, const py::sequence& keys, bool find_tail,
                       std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_lookup(get(), ns.get(), views.data(), views.size(), find_tail, call,
                           queue.get(), tag);
    });
  }

  // `blocks`: (key, parent, token_count, block_index, layers) each; a layer is (k, v), or records.
  std::uint64_t Store(Queue& queue, const Namespace& ns, const py::sequence& blocks,
                      bool wait_durable, std::uint32_t head_begin, std::uint32_t head_count,
                      std::uint64_t timeout_ms) {
    auto pending = std::make_unique<Pending>();
    std::vector<kvmill_store_block> to;
    std::vector<std::vector<kvmill_store_layer>> layers;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const auto from = py::cast<py::tuple>(blocks[b]);
      auto block = Init<kvmill_store_block>();
      const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(from[0], from[1]));
      block.key = keys[0];
      block.parent = keys[1];
      block.token_count = from[2].cast<std::uint32_t>();
      block.block_index = from[3].cast<std::uint32_t>();
      const auto items = py::cast<py::sequence>(from[4]);
      if (items.size() != ns.layer_count()) {
        Invalid("block " + std::to_string(b) + ": " + std::to_string(items.size()) +
                " layers, the namespace has " + std::to_string(ns.layer_count()));
      }
      std::vector<kvmill_store_layer>& some = layers.emplace_back();
      for (std::size_t l = 0; l < items.size(); ++l) {
        const py::object item = items[l];
        auto layer = Init<kvmill_store_layer>();
        if (py::isinstance<py::tuple>(item)) {
          const auto kv = py::reinterpret_borrow<py::tuple>(item);
          if (kv.size() != 2) throw py::type_error(At({b, l, "K and V"}, "want (k, v)"));
          const std::uint32_t heads = HeadsOf(ns, l, head_count);
          layer.k = ToView<kvmill_kv>(kv[0], ns, l, heads, block.token_count, false, {b, l, "k"},
                                      pending.get());
          layer.v = ToView<kvmill_kv>(kv[1], ns, l, heads, block.token_count, false, {b, l, "v"},
                                      pending.get());
        } else {
          const Py_buffer& records = ToBytes(item, false, {b, l, "records"}, &pending->pins);
          layer.records = records.buf;
          layer.records_bytes = static_cast<std::size_t>(records.len);
        }
        some.push_back(layer);
      }
      block.layers = some.data();
      block.layer_count = some.size();
      to.push_back(block);
    }
    auto options = Init<kvmill_store_options>();
    options.wait_durable = wait_durable ? 1 : 0;
    options.head_begin = head_begin;
    options.head_count = head_count;
    return Start(
        timeout_ms,
        [&](const kvmill_call_options* call, std::uint64_t tag) {
          return kvmill_store(get(), ns.get(), to.data(), to.size(), &options, call, queue.get(),
                              tag);
        },
        std::move(pending));
  }

  // `outputs`: per key, per layer (k, v), or with records and pages a writable buffer.
  std::uint64_t Fetch(Queue& queue, const Namespace& ns, const py::sequence& keys,
                      const py::sequence& outputs, std::uint32_t form, std::uint32_t frame,
                      std::uint32_t head_begin, std::uint32_t head_count,
                      std::uint64_t timeout_ms) {
    auto pending = std::make_unique<Pending>();
    const std::vector<kvmill_key> views = ToKeys(keys);
    if (outputs.size() != keys.size()) {
      Invalid("memory for " + std::to_string(outputs.size()) + " blocks, want " +
              std::to_string(keys.size()));
    }
    std::vector<kvmill_fetch_output> to;
    for (std::size_t b = 0; b < outputs.size(); ++b) {
      const auto items = py::cast<py::sequence>(outputs[b]);
      if (items.size() != ns.layer_count()) {
        Invalid("block " + std::to_string(b) + ": " + std::to_string(items.size()) +
                " layers, the namespace has " + std::to_string(ns.layer_count()));
      }
      for (std::size_t l = 0; l < items.size(); ++l) {
        const py::object item = items[l];
        auto output = Init<kvmill_fetch_output>();
        if (form == KVMILL_FORM_VALUES16) {
          if (!py::isinstance<py::tuple>(item) || py::len(item) != 2) {
            throw py::type_error(At({b, l, "K and V"}, "want (k, v)"));
          }
          const auto kv = py::reinterpret_borrow<py::tuple>(item);
          const std::uint32_t heads = HeadsOf(ns, l, head_count);
          output.k =
              ToView<kvmill_mutable_kv>(kv[0], ns, l, heads, 1, true, {b, l, "k"}, pending.get());
          output.v =
              ToView<kvmill_mutable_kv>(kv[1], ns, l, heads, 1, true, {b, l, "v"}, pending.get());
        } else {
          const Py_buffer& bytes = ToBytes(item, true, {b, l, "memory"}, &pending->pins);
          output.data = bytes.buf;
          output.data_bytes = static_cast<std::size_t>(bytes.len);
        }
        to.push_back(output);
      }
    }
    auto options = Init<kvmill_fetch_options>();
    options.form = form;
    options.frame = frame;
    options.head_begin = head_begin;
    options.head_count = head_count;
    return Start(
        timeout_ms,
        [&](const kvmill_call_options* call, std::uint64_t tag) {
          return kvmill_fetch(get(), ns.get(), views.data(), views.size(), to.data(), to.size(),
                              &options, call, queue.get(), tag);
        },
        std::move(pending));
  }

  std::uint64_t Remove(Queue& queue, const Namespace& ns, const py::sequence& keys,
                       std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_remove(get(), ns.get(), views.data(), views.size(), call, queue.get(), tag);
    });
  }

  std::uint64_t Clear(Queue& queue, const Namespace& ns, std::uint64_t timeout_ms) {
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_clear(get(), ns.get(), call, queue.get(), tag);
    });
  }

  std::uint64_t Flush(Queue& queue, std::uint64_t timeout_ms) {
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_flush(get(), call, queue.get(), tag);
    });
  }

  std::uint64_t Stat(Queue& queue, std::uint64_t timeout_ms) {
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_stat(get(), call, queue.get(), tag);
    });
  }

 private:
  kvmill_client* get() const {
    if (client_ == nullptr) {
      throw Failure{KVMILL_FAILED_PRECONDITION, "the client is closed"};
    }
    return client_;
  }

  // Keeps the GIL: starting does not wait for anybody.
  template <typename StartFn>
  std::uint64_t Start(std::uint64_t timeout_ms, StartFn start,
                      std::unique_ptr<Pending> pending = std::make_unique<Pending>()) {
    auto call = Init<kvmill_call_options>();
    call.timeout_ms = timeout_ms;
    const auto tag = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pending.get()));
    Need(start(&call, tag));
    static_cast<void>(pending.release());  // Whoever takes the event has it now.
    return tag;
  }

  kvmill_client* client_ = nullptr;
};

py::bytes TailKeyOf(const py::bytes& parent, std::uint32_t token_count) {
  const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(parent));
  std::uint8_t out[32];
  Need(kvmill_tail_key(keys[0], token_count, out));
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
      .def("record_bytes", [](const Namespace& n,
                              std::size_t l) { return kvmill_namespace_record_bytes(n.get(), l); })
      .def("page_bytes_max", [](const Namespace& n, std::size_t l) {
        return kvmill_namespace_page_bytes_max(n.get(), l);
      });
  py::class_<Queue>(m, "Queue")
      .def(py::init<>())
      .def_property_readonly("fd", &Queue::fd)
      .def_property_readonly("running", &Queue::running)
      .def("take", &Queue::Take);
  py::class_<Client>(m, "Client")
      .def(py::init<const std::string&, std::uint64_t>())
      .def("close", &Client::Close)
      .def_property_readonly("closed", &Client::closed)
      .def_property_readonly("boot_id", &Client::boot_id)
      .def("open_namespace", &Client::OpenNamespace)
      .def("find_namespace", &Client::FindNamespace)
      .def("lookup", &Client::Lookup)
      .def("store", &Client::Store)
      .def("fetch", &Client::Fetch)
      .def("remove", &Client::Remove)
      .def("clear", &Client::Clear)
      .def("flush", &Client::Flush)
      .def("stat", &Client::Stat);
}

}  // namespace kvmill::python
