// Clients: each call starts one operation of the C ABI.
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "client/kvmill_engine.h"
#include "client/kvmill_map.h"
#include "client/python/engine.h"
#include "client/python/mapped.h"
#include "client/python/native.h"
#include "client/python/tickets.h"

namespace kvmill::python {
namespace {

std::uint32_t HeadsOf(const Namespace& ns, std::size_t layer, std::uint32_t head_count) {
  return head_count == 0 ? ns.group_of(layer).kv_heads : head_count;
}

void CheckName(const std::string& name) { CheckText(name, "a name"); }

class Client {
 public:
  // What the session has to say comes out of `session`, with tag 0.
  Client(const std::string& address, std::uint64_t timeout_ms, const py::object& path,
         bool plaintext, const py::object& encode_in, const py::object& encode_threads,
         const std::optional<std::string>& device, const std::vector<std::string>& identity,
         const py::object& when_away, const Queue& session) {
    auto options = Init<kvmill_client_options>();
    SetIdentity(address, identity, &options);
    options.timeout_ms = timeout_ms;
    options.path = ToInt<std::uint32_t>(path, "path");
    options.data_plane_plaintext = plaintext ? 1 : 0;
    options.encode_in = ToInt<std::uint32_t>(encode_in, "encode_in");
    options.encode_threads = ToInt<std::uint32_t>(encode_threads, "encode_threads");
    options.when_away = ToInt<std::uint32_t>(when_away, "when_away");
    if (device.has_value()) {
      CheckText(*device, "a device");
      options.device = device->c_str();
    }
    options.session_queue = session.get();
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

  std::string ucx_transport() const {
    char text[257];
    Need(kvmill_client_ucx_transport(get(), text, sizeof(text)));
    return text;
  }

  std::uint64_t OpenNamespace(Queue& queue, const std::string& name, const py::tuple& spec,
                              bool fallback, std::uint64_t timeout_ms) {
    std::vector<kvmill_layer_group> groups;
    std::vector<std::vector<std::uint16_t>> layers;
    for (const py::handle item : py::cast<py::sequence>(spec[0])) {
      const auto from = py::cast<py::tuple>(item);
      auto group = Init<kvmill_layer_group>();
      std::vector<std::uint16_t>& numbers = layers.emplace_back();
      for (const py::handle layer : py::cast<py::sequence>(from[0])) {
        numbers.push_back(ToInt<std::uint16_t>(layer, "layer"));
      }
      group.layers = numbers.data();  // Of a vector that moves, not its elements.
      group.layer_count = numbers.size();
      group.kv_heads = ToInt<std::uint32_t>(from[1], "kv_heads");
      group.head_dim = ToInt<std::uint32_t>(from[2], "head_dim");
      group.attention = ToInt<std::uint32_t>(from[3], "attention");
      group.window_tokens = ToInt<std::uint32_t>(from[4], "window_tokens");
      groups.push_back(group);
    }
    std::vector<std::string> texts;
    for (std::size_t i = 1; i <= 5; ++i) {
      texts.push_back(spec[i].cast<std::string>());
      CheckText(texts.back(), "a text");
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
    to.source_dtype = ToInt<std::uint32_t>(spec[6], "source_dtype");
    to.block_tokens = ToInt<std::uint32_t>(spec[7], "block_tokens");
    to.key_bits = ToInt<std::uint32_t>(spec[8], "key_bits");
    to.value_bits = ToInt<std::uint32_t>(spec[9], "value_bits");
    to.frame = ToInt<std::uint32_t>(spec[10], "frame");
    to.sink_blocks = ToInt<std::uint32_t>(spec[11], "sink_blocks");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      const auto opens = fallback ? &kvmill_open_namespace_or_fallback : &kvmill_open_namespace;
      return opens(get(), name.c_str(), &to, call, queue.get(), tag);
    });
  }

  std::uint64_t FindNamespace(Queue& queue, const std::string& name, std::uint64_t timeout_ms) {
    CheckName(name);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_find_namespace(get(), name.c_str(), call, queue.get(), tag);
    });
  }

  // `tails`: (key, token_count, block_index) each.
  std::uint64_t Lookup(Queue& queue, const Namespace& ns, const py::sequence& keys,
                       const py::sequence& tails, std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    std::vector<kvmill_tail> candidates;
    for (const py::handle item : tails) {
      const auto from = py::cast<py::tuple>(item);
      auto tail = Init<kvmill_tail>();
      tail.key = ToKeys(py::make_tuple(from[0]))[0];
      tail.token_count = ToInt<std::uint32_t>(from[1], "token_count");
      tail.block_index = ToInt<std::uint32_t>(from[2], "block_index");
      candidates.push_back(tail);
    }
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_lookup(get(), ns.get(), views.data(), views.size(), candidates.data(),
                           candidates.size(), call, queue.get(), tag);
    });
  }

  // `blocks`: (key, parent, token_count, block_index, layers) each; a layer is (k, v), or records.
  std::uint64_t Store(Queue& queue, const Namespace& ns, const py::sequence& blocks,
                      bool wait_durable, const py::object& first_head, const py::object& heads_held,
                      std::uint64_t timeout_ms) {
    auto pending = std::make_unique<Pending>();
    const auto head_begin = ToInt<std::uint32_t>(first_head, "head_begin");
    const auto head_count = ToInt<std::uint32_t>(heads_held, "head_count");
    std::vector<kvmill_store_block> to;
    std::vector<std::vector<kvmill_store_layer>> layers;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const auto from = py::cast<py::tuple>(blocks[b]);
      auto block = Init<kvmill_store_block>();
      const std::vector<kvmill_key> keys = ToKeys(py::make_tuple(from[0], from[1]));
      block.key = keys[0];
      block.parent = keys[1];
      block.token_count = ToInt<std::uint32_t>(from[2], "token_count");
      block.block_index = ToInt<std::uint32_t>(from[3], "block_index");
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
                      const py::sequence& outputs, std::uint32_t form, const py::object& frame,
                      const py::object& first_head, const py::object& heads_held,
                      std::uint64_t timeout_ms) {
    auto pending = std::make_unique<Pending>();
    const auto head_begin = ToInt<std::uint32_t>(first_head, "head_begin");
    const auto head_count = ToInt<std::uint32_t>(heads_held, "head_count");
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
    options.frame = ToInt<std::uint32_t>(frame, "frame");
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

  std::uint64_t Touch(Queue& queue, const Namespace& ns, const py::sequence& keys,
                      std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_touch(get(), ns.get(), views.data(), views.size(), call, queue.get(), tag);
    });
  }

  std::uint64_t Map(Queue& queue, const Namespace& ns, const py::sequence& keys,
                    std::uint64_t lease_ms, const py::object& memory, std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    auto options = Init<kvmill_map_options>();
    options.lease_ms = lease_ms;
    options.memory = ToInt<std::uint32_t>(memory, "memory");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_map(get(), ns.get(), views.data(), views.size(), &options, call, queue.get(),
                        tag);
    });
  }

  std::uint64_t Renew(Queue& queue, const Mapped& mapped, std::uint64_t lease_ms,
                      std::uint64_t timeout_ms) {
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_renew(get(), mapped.get(), lease_ms, call, queue.get(), tag);
    });
  }

  std::uint64_t RegisterMemory(Queue& queue, const Namespace& ns, const py::tuple& geometry,
                               std::uint64_t timeout_ms) {
    const Geometry to(geometry);
    auto pending = std::make_unique<Pending>();
    pending->kept = to.memories();
    return Start(
        timeout_ms,
        [&](const kvmill_call_options* call, std::uint64_t tag) {
          return kvmill_register_memory(get(), ns.get(), &to.get(), call, queue.get(), tag);
        },
        std::move(pending));
  }

  // (handle, allocation_bytes, offset_bytes, device) of memory of the client's device.
  py::tuple ExportMemory(const py::object& address, const py::object& bytes) const {
    auto source = Init<kvmill_region_source>();
    Need(kvmill_export_memory(
        get(), reinterpret_cast<const void*>(ToInt<std::uintptr_t>(address, "address")),
        ToInt<std::size_t>(bytes, "bytes"), &source));
    return py::make_tuple(
        py::bytes(reinterpret_cast<const char*>(source.handle), sizeof(source.handle)),
        source.allocation_bytes, source.offset_bytes,
        py::bytes(reinterpret_cast<const char*>(source.device), sizeof(source.device)));
  }

  // `blocks`: (key, parent, token_count, block_index, pages of each layer group) each.
  // `ready_layers` None: all.
  std::uint64_t StorePages(Queue& queue, const Namespace& ns, const py::object& registration,
                           const py::sequence& blocks, const py::object& request,
                           const py::object& ready_layers, bool wait_durable,
                           std::uint64_t timeout_ms) {
    const PageBlocks to(blocks);
    auto options = Init<kvmill_page_store_options>();
    options.request = ToInt<std::uint64_t>(request, "request");
    if (!ready_layers.is_none()) {
      options.by_layer = 1;
      options.ready_layers = ToInt<std::uint32_t>(ready_layers, "ready_layers");
    }
    options.wait_durable = wait_durable ? 1 : 0;
    const auto number = ToInt<std::uint64_t>(registration, "registration");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_store_pages(get(), ns.get(), number, to.data(), to.size(), &options, call,
                                queue.get(), tag);
    });
  }

  void ReadyPages(const py::object& request, const py::object& layers) {
    Need(kvmill_ready_pages(get(), ToInt<std::uint64_t>(request, "request"),
                            ToInt<std::uint32_t>(layers, "layers")));
  }

  std::uint64_t FlushPages(Queue& queue, const py::object& request, std::uint64_t timeout_ms) {
    const auto number = ToInt<std::uint64_t>(request, "request");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_flush_pages(get(), number, call, queue.get(), tag);
    });
  }

  std::uint64_t FlushBlocks(Queue& queue, const py::sequence& keys, std::uint64_t timeout_ms) {
    const std::vector<kvmill_key> views = ToKeys(keys);
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_flush_blocks(get(), views.data(), views.size(), call, queue.get(), tag);
    });
  }

  std::uint64_t CancelPages(Queue& queue, const py::object& request, std::uint64_t timeout_ms) {
    const auto number = ToInt<std::uint64_t>(request, "request");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_cancel_pages(get(), number, call, queue.get(), tag);
    });
  }

  std::uint64_t UnregisterMemory(Queue& queue, const py::object& registration,
                                 std::uint64_t timeout_ms) {
    const auto number = ToInt<std::uint64_t>(registration, "registration");
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_unregister_memory(get(), number, call, queue.get(), tag);
    });
  }

  // `blocks`: of PromisedBlocks.
  std::uint64_t CreateTicket(Queue& queue, const Namespace& ns, const py::sequence& blocks,
                             const std::string& consumer, std::uint64_t ttl_ms,
                             std::uint64_t life_ms, std::uint64_t timeout_ms) {
    const PromisedBlocks to(blocks);
    CheckName(consumer);
    auto options = Init<kvmill_ticket_options>();
    options.consumer = consumer.c_str();
    options.ttl_ms = ttl_ms;
    options.life_ms = life_ms;
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_create_ticket(get(), ns.get(), to.data(), to.size(), &options, call,
                                  queue.get(), tag);
    });
  }

  std::uint64_t RevokeTicket(Queue& queue, const py::bytes& ticket, std::uint64_t timeout_ms) {
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_revoke_ticket(get(), TicketOf(ticket), call, queue.get(), tag);
    });
  }

  std::uint64_t RedeemTicket(Queue& queue, const Namespace& ns, const py::bytes& ticket,
                             bool updates, std::uint64_t timeout_ms) {
    auto options = Init<kvmill_redeem_options>();
    options.updates = updates ? 1 : 0;
    return Start(timeout_ms, [&](const kvmill_call_options* call, std::uint64_t tag) {
      return kvmill_redeem_ticket(get(), ns.get(), TicketOf(ticket), &options, call, queue.get(),
                                  tag);
    });
  }

  void CancelRedeem(const py::bytes& ticket) {
    Need(kvmill_cancel_redeem(get(), TicketOf(ticket)));
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
    const CurrentRequest request;
    request.AddTo(&call);
    const auto tag = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pending.get()));
    Need(start(&call, tag));
    static_cast<void>(pending.release());  // Whoever takes the event has it now.
    return tag;
  }

  kvmill_client* client_ = nullptr;
};

}  // namespace

void AddClient(py::module_& m) {
  py::class_<Client>(m, "Client")
      .def(py::init<const std::string&, std::uint64_t, const py::object&, bool, const py::object&,
                    const py::object&, const std::optional<std::string>&,
                    const std::vector<std::string>&, const py::object&, const Queue&>())
      .def("close", &Client::Close)
      .def_property_readonly("closed", &Client::closed)
      .def_property_readonly("boot_id", &Client::boot_id)
      .def_property_readonly("ucx_transport", &Client::ucx_transport)
      .def("open_namespace", &Client::OpenNamespace)
      .def("find_namespace", &Client::FindNamespace)
      .def("lookup", &Client::Lookup)
      .def("store", &Client::Store)
      .def("fetch", &Client::Fetch)
      .def("remove", &Client::Remove)
      .def("touch", &Client::Touch)
      .def("map", &Client::Map)
      .def("renew", &Client::Renew)
      .def("register_memory", &Client::RegisterMemory)
      .def("unregister_memory", &Client::UnregisterMemory)
      .def("export_memory", &Client::ExportMemory)
      .def("store_pages", &Client::StorePages)
      .def("ready_pages", &Client::ReadyPages)
      .def("flush_pages", &Client::FlushPages)
      .def("flush_blocks", &Client::FlushBlocks)
      .def("cancel_pages", &Client::CancelPages)
      .def("create_ticket", &Client::CreateTicket)
      .def("revoke_ticket", &Client::RevokeTicket)
      .def("redeem_ticket", &Client::RedeemTicket)
      .def("cancel_redeem", &Client::CancelRedeem)
      .def("clear", &Client::Clear)
      .def("flush", &Client::Flush)
      .def("stat", &Client::Stat);
}

}  // namespace kvmill::python
