// Clients and their operations.
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/fetch_outputs.h"
#include "client/c_api/operation.h"
#include "client/c_api/queue.h"
#include "client/client.h"
#include "storage/core/status_macros.h"
#include "storage/device/device.h"

namespace kvmill::c_api {
namespace {

absl::Status WriteText(const std::string& text, char* out, std::size_t out_bytes) {
  if (out == nullptr) return Null("out");
  if (out_bytes < text.size() + 1) {
    return absl::OutOfRangeError(absl::StrCat("out_bytes ", out_bytes, ", want ", text.size() + 1));
  }
  std::memcpy(out, text.c_str(), text.size() + 1);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const char* name) {
  if (name == nullptr) return std::shared_ptr<Device>();
  constexpr std::size_t kNameMax = 64;
  const absl::string_view text(name, strnlen(name, kNameMax + 1));
  if (text.size() > kNameMax) {
    return absl::InvalidArgumentError(absl::StrCat("device is longer than ", kNameMax, " bytes"));
  }
  const absl::Status wrong =
      absl::InvalidArgumentError(absl::StrCat("device ", text, ": want host, cuda or cuda:N"));
  // Callers must know which device their addresses are of.
  if (text == "auto") return wrong;
  absl::StatusOr<std::unique_ptr<Device>> opened = OpenDevice(text == "cuda" ? "cuda:0" : text);
  if (absl::IsInvalidArgument(opened.status())) return wrong;
  if (!opened.ok()) {
    return absl::Status(opened.status().code(),
                        absl::StrCat("device ", text, ": ", opened.status().message()));
  }
  // Its threads are not there in a child of fork().
  return std::shared_ptr<Device>(opened->release(), [pid = getpid()](Device* device) {
    if (getpid() == pid) delete device;
  });
}

struct FetchInputs final : Inputs {
  std::vector<BlockKey> keys;
  std::unique_ptr<FetchOutputs> outputs;
};

// By one of the two ways that Client has.
template <typename Open>
kvmill_code OpenNamespace(Open open, kvmill_client* client, const char* name,
                          const kvmill_namespace_spec* spec, const kvmill_call_options* call,
                          kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    if (name == nullptr) return Null("name");
    KVMILL_ASSIGN_OR_RETURN(const NamespaceSpec to, SpecOf(spec));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_OPEN_NAMESPACE, client, call, queue, tag));
    return operation.Start<ClientNamespace>([&](const CallOptions& options, auto done) {
      (client->client.get()->*open)(name, to, options, std::move(done));
    });
  });
}

}  // namespace
}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* kvmill_version(void) { return KVMILL_VERSION; }

kvmill_code kvmill_client_create(const kvmill_client_options* options, kvmill_client** client) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    *client = nullptr;
    kvmill_client_options from;
    KVMILL_RETURN_IF_ERROR(ReadClientOptions("options", options, &from));
    KVMILL_ASSIGN_OR_RETURN(Client::Options to, ClientOptionsOf(from));
    auto made = std::make_unique<kvmill_client>();
    KVMILL_ASSIGN_OR_RETURN(made->device, DeviceOf(from.device));
    to.device = made->device.get();
    KVMILL_ASSIGN_OR_RETURN(made->client, Client::Create(to));
    made->pid = getpid();
    *client = made.release();
    return absl::OkStatus();
  });
}

kvmill_code kvmill_client_destroy(kvmill_client* client) {
  return Guard([&]() -> absl::Status {
    delete client;
    return absl::OkStatus();
  });
}

kvmill_code kvmill_client_boot_id(const kvmill_client* client, char* out, size_t out_bytes) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    return WriteText(client->client->boot_id(), out, out_bytes);
  });
}

kvmill_code kvmill_client_ucx_transport(const kvmill_client* client, char* out, size_t out_bytes) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    return WriteText(client->client->ucx_transport(), out, out_bytes);
  });
}

kvmill_code kvmill_open_namespace(kvmill_client* client, const char* name,
                                  const kvmill_namespace_spec* spec,
                                  const kvmill_call_options* call, kvmill_queue* queue,
                                  uint64_t tag) {
  return OpenNamespace(&Client::OpenNamespaceAsync, client, name, spec, call, queue, tag);
}

kvmill_code kvmill_open_namespace_or_fallback(kvmill_client* client, const char* name,
                                              const kvmill_namespace_spec* spec,
                                              const kvmill_call_options* call, kvmill_queue* queue,
                                              uint64_t tag) {
  return OpenNamespace(&Client::OpenNamespaceOrFallbackAsync, client, name, spec, call, queue, tag);
}

kvmill_code kvmill_find_namespace(kvmill_client* client, const char* name,
                                  const kvmill_call_options* call, kvmill_queue* queue,
                                  uint64_t tag) {
  return Guard([&]() -> absl::Status {
    if (name == nullptr) return Null("name");
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_FIND_NAMESPACE, client, call, queue, tag));
    return operation.Start<ClientNamespace>([&](const CallOptions& options, auto done) {
      client->client->FindNamespaceAsync(name, options, std::move(done));
    });
  });
}

kvmill_code kvmill_tail_key(kvmill_key parent, uint32_t token_count, kvmill_key key,
                            uint8_t out[32]) {
  return Guard([&]() -> absl::Status {
    if (out == nullptr) return Null("out");
    KVMILL_ASSIGN_OR_RETURN(const BlockKey before, KeyOf("parent", parent));
    KVMILL_ASSIGN_OR_RETURN(const BlockKey own, KeyOf("key", key));
    if (own.empty()) return absl::InvalidArgumentError("key is empty");
    const BlockKey tail = TailKey(before, token_count, own);
    std::memcpy(out, tail.data(), 32);
    return absl::OkStatus();
  });
}

kvmill_code kvmill_lookup(kvmill_client* client, const kvmill_namespace* ns, const kvmill_key* keys,
                          size_t key_count, const kvmill_tail* tails, size_t tail_count,
                          const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_LOOKUP, client, call, queue, tag));
    KeyInputs* const inputs = operation.Keep(std::make_unique<KeyInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<TailCandidate> candidates,
                            TailsOf(tails, tail_count));
    return operation.Start<LookupResult>([&](const CallOptions& options, auto done) {
      client->client->LookupAsync(ns->data->ns, inputs->keys, candidates, options, std::move(done));
    });
  });
}

kvmill_code kvmill_store(kvmill_client* client, const kvmill_namespace* ns,
                         const kvmill_store_block* blocks, size_t block_count,
                         const kvmill_store_options* options, const kvmill_call_options* call,
                         kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_STORE, client, call, queue, tag));
    kvmill_store_options from;
    KVMILL_RETURN_IF_ERROR(ReadOptions("options", options, &from));
    StoreOptions to;
    to.wait_durable = from.wait_durable != 0;
    to.head_begin = from.head_begin;
    to.head_count = from.head_count;
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<StoreInputs> made,
                            StoreInputsOf(*ns->data, blocks, block_count, from));
    StoreInputs* const inputs = operation.Keep(std::move(made));
    return operation.Start<StoreResult>([&](const CallOptions& call_options, auto done) {
      client->client->StoreAsync(ns->data->ns, inputs->blocks, to, call_options, std::move(done));
    });
  });
}

kvmill_code kvmill_fetch(kvmill_client* client, const kvmill_namespace* ns, const kvmill_key* keys,
                         size_t key_count, const kvmill_fetch_output* outputs, size_t output_count,
                         const kvmill_fetch_options* options, const kvmill_call_options* call,
                         kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_FETCH, client, call, queue, tag));
    kvmill_fetch_options from;
    KVMILL_RETURN_IF_ERROR(ReadOptions("options", options, &from));
    FetchInputs* const inputs = operation.Keep(std::make_unique<FetchInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    std::vector<kvmill_fetch_output> to;
    constexpr std::size_t kLeast = offsetof(kvmill_fetch_output, v) + sizeof(kvmill_mutable_kv);
    const auto add_output = [&to](std::size_t, const kvmill_fetch_output& output) {
      to.push_back(output);
      return absl::OkStatus();
    };
    KVMILL_RETURN_IF_ERROR(ReadArray("outputs", outputs, output_count, kLeast, add_output));
    kvmill_result& result = operation.result();
    result.layer_count = ns->data->layer_count();
    if (from.form == KVMILL_FORM_PAGES) result.page_bytes.assign(output_count, 0);
    inputs->outputs =
        std::make_unique<FetchOutputs>(ns->data, from, std::move(to), &result.page_bytes);
    KVMILL_RETURN_IF_ERROR(inputs->outputs->Check(key_count));
    return operation.Start<FetchResult>([&](const CallOptions& call_options, auto done) {
      client->client->FetchAsync(ns->data->ns, inputs->keys, *inputs->outputs, call_options,
                                 std::move(done));
    });
  });
}

kvmill_code kvmill_remove(kvmill_client* client, const kvmill_namespace* ns, const kvmill_key* keys,
                          size_t key_count, const kvmill_call_options* call, kvmill_queue* queue,
                          uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_REMOVE, client, call, queue, tag));
    KeyInputs* const inputs = operation.Keep(std::make_unique<KeyInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    return operation.Start<std::uint64_t>([&](const CallOptions& options, auto done) {
      client->client->RemoveAsync(ns->data->ns, inputs->keys, options, std::move(done));
    });
  });
}

kvmill_code kvmill_touch(kvmill_client* client, const kvmill_namespace* ns, const kvmill_key* keys,
                         size_t key_count, const kvmill_call_options* call, kvmill_queue* queue,
                         uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_TOUCH, client, call, queue, tag));
    KeyInputs* const inputs = operation.Keep(std::make_unique<KeyInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    return operation.Start<std::uint64_t>([&](const CallOptions& options, auto done) {
      client->client->TouchAsync(ns->data->ns, inputs->keys, options, std::move(done));
    });
  });
}

kvmill_code kvmill_clear(kvmill_client* client, const kvmill_namespace* ns,
                         const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_CLEAR, client, call, queue, tag));
    return operation.Start<std::uint64_t>([&](const CallOptions& options, auto done) {
      client->client->ClearAsync(ns->data->ns, options, std::move(done));
    });
  });
}

kvmill_code kvmill_flush(kvmill_client* client, const kvmill_call_options* call,
                         kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_FLUSH, client, call, queue, tag));
    return operation.Start<std::uint64_t>([&](const CallOptions& options, auto done) {
      client->client->FlushAsync(options, std::move(done));
    });
  });
}

kvmill_code kvmill_stat(kvmill_client* client, const kvmill_call_options* call, kvmill_queue* queue,
                        uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_STAT, client, call, queue, tag));
    return operation.Start<ServerStat>([&](const CallOptions& options, auto done) {
      client->client->StatAsync(options, std::move(done));
    });
  });
}

}  // extern "C"
