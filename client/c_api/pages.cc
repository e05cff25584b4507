// Shared memory, and stores from registered pages.
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/operation.h"
#include "client/kvmill_engine.h"
#include "client/shared_memory.h"
#include "storage/core/status_macros.h"
#include "storage/device/device.h"

struct kvmill_shared_memory {
  kvmill::SharedMemory memory;
};

namespace kvmill::c_api {
namespace {

struct PageInputs final : Inputs {
  std::vector<PageBlock> blocks;
  std::vector<std::vector<PageNumbers>> lists;  // Of each block; into the caller's numbers.
};

// The client copies the numbers when it is called.
absl::Status AppendBlock(const NamespaceData& ns, const kvmill_page_block& from,
                         PageInputs* inputs) {
  PageBlock& to = inputs->blocks.emplace_back();
  KVMILL_ASSIGN_OR_RETURN(to.key, KeyOf("key", from.key));
  KVMILL_ASSIGN_OR_RETURN(to.parent, KeyOf("parent", from.parent));
  to.token_count = from.token_count;
  to.block_index = from.block_index;
  const std::size_t groups = ns.ns.spec.groups.size();
  if (from.group_count != groups) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group_count ", from.group_count, ", the namespace has ", groups, " layer groups"));
  }
  if (from.pages == nullptr) return Null("pages");
  std::vector<PageNumbers>& lists = inputs->lists.emplace_back();
  for (std::size_t group = 0; group < groups; ++group) {
    const kvmill_page_numbers& pages = from.pages[group];
    if (pages.count > ns.ns.spec.block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("group ", group, ": ", pages.count,
                                                     " pages, at most ", ns.ns.spec.block_tokens));
    }
    if (pages.numbers == nullptr && pages.count > 0) return Null("numbers");
    lists.emplace_back(pages.numbers, pages.count);
  }
  to.pages = lists;  // Of a vector that moves, not its elements.
  return absl::OkStatus();
}

// For functions of the client that answer with a Status.
template <typename Done>
auto Nothing(Done done) {
  return [done](const absl::Status& status) {
    done(status.ok() ? absl::StatusOr<std::monostate>(std::monostate()) : status);
  };
}

}  // namespace
}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

kvmill_code kvmill_shared_memory_create(size_t bytes, kvmill_shared_memory** memory) {
  return Guard([&]() -> absl::Status {
    if (memory == nullptr) return Null("memory");
    *memory = nullptr;
    auto made = std::make_unique<kvmill_shared_memory>();
    KVMILL_ASSIGN_OR_RETURN(made->memory, SharedMemory::Create(bytes));
    *memory = made.release();
    return absl::OkStatus();
  });
}

void kvmill_shared_memory_free(kvmill_shared_memory* memory) { delete memory; }

void* kvmill_shared_memory_data(const kvmill_shared_memory* memory) {
  return memory == nullptr ? nullptr : memory->memory.data();
}

size_t kvmill_shared_memory_bytes(const kvmill_shared_memory* memory) {
  return memory == nullptr ? 0 : memory->memory.bytes();
}

int kvmill_shared_memory_fd(const kvmill_shared_memory* memory) {
  return memory == nullptr ? -1 : memory->memory.fd();
}

kvmill_code kvmill_export_memory(const kvmill_client* client, const void* start, size_t bytes,
                                 kvmill_region_source* source) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    if (source == nullptr) return Null("source");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    if (client->device == nullptr) {
      return absl::FailedPreconditionError(
          "the client has no device: kvmill_client_options.device");
    }
    KVMILL_ASSIGN_OR_RETURN(const IpcMemory memory, client->device->ExportIpc(start, bytes));
    kvmill_region_source to = {};
    to.kind = KVMILL_REGION_DEVICE_IPC;
    to.fd = -1;
    to.offset_bytes = memory.offset_bytes;
    to.allocation_bytes = memory.allocation_bytes;
    std::memcpy(to.handle, memory.handle.data(), sizeof(to.handle));
    std::memcpy(to.device, client->device->info().uuid.data(), sizeof(to.device));
    return WriteStruct("source", to, source);
  });
}

kvmill_code kvmill_store_pages(kvmill_client* client, const kvmill_namespace* ns,
                               uint64_t registration, const kvmill_page_block* blocks,
                               size_t block_count, const kvmill_page_store_options* options,
                               const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_STORE_PAGES, client, call, queue, tag));
    kvmill_page_store_options from;
    KVMILL_RETURN_IF_ERROR(ReadOptions("options", options, &from));
    PageStoreOptions to;
    to.request = from.request;
    if (from.by_layer != 0) {
      to.ready_layers = from.ready_layers;
    } else if (from.ready_layers != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("ready_layers ", from.ready_layers, " without by_layer"));
    }
    to.wait_durable = from.wait_durable != 0;
    PageInputs inputs;
    const auto add_block = [&](std::size_t i, const kvmill_page_block& block) {
      const absl::Status status = AppendBlock(*ns->data, block, &inputs);
      return status.ok()
                 ? status
                 : absl::Status(status.code(), absl::StrCat("block ", i, ": ", status.message()));
    };
    constexpr std::size_t kLeast = offsetof(kvmill_page_block, token_count) + sizeof(uint32_t);
    KVMILL_RETURN_IF_ERROR(ReadArray("blocks", blocks, block_count, kLeast, add_block));
    return operation.Start<StoreResult>([&](const CallOptions& call_options, auto done) {
      client->client->StorePagesAsync(ns->data->ns, registration, inputs.blocks, to, call_options,
                                      std::move(done));
    });
  });
}

kvmill_code kvmill_ready_pages(kvmill_client* client, uint64_t request, uint32_t layers) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    client->client->ReadyPages(request, layers);
    return absl::OkStatus();
  });
}

kvmill_code kvmill_flush_pages(kvmill_client* client, uint64_t request,
                               const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_FLUSH_PAGES, client, call, queue, tag));
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->FlushPagesAsync(request, options, Nothing(std::move(done)));
    });
  });
}

kvmill_code kvmill_flush_blocks(kvmill_client* client, const kvmill_key* keys, size_t key_count,
                                const kvmill_call_options* call, kvmill_queue* queue,
                                uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_FLUSH_PAGES, client, call, queue, tag));
    KeyInputs* const inputs = operation.Keep(std::make_unique<KeyInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->FlushPagesAsync(inputs->keys, options, Nothing(std::move(done)));
    });
  });
}

kvmill_code kvmill_cancel_pages(kvmill_client* client, uint64_t request,
                                const kvmill_call_options* call, kvmill_queue* queue,
                                uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_CANCEL_PAGES, client, call, queue, tag));
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->CancelPagesAsync(request, options, Nothing(std::move(done)));
    });
  });
}

}  // extern "C"
