// The engine's memory, described.
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/operation.h"
#include "client/kvmill_engine.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::size_t kBootIdBytesMax = 64;

absl::Status ReadPlaces(absl::string_view what, const kvmill_engine_place* places,
                        std::size_t count, std::vector<EnginePlace>* to) {
  for (std::size_t i = 0; i < count; ++i) {
    if (places[i].zero != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " ", i, ": zero is ", places[i].zero, ", want 0"));
    }
    to->push_back({places[i].region, places[i].offset_bytes});
  }
  return absl::OkStatus();
}

absl::Status ReadSource(const kvmill_region_source& from, EngineRegion* to) {
  switch (from.kind) {
    case KVMILL_REGION_PRIVATE:
      return absl::OkStatus();
    case KVMILL_REGION_MEMFD:
      if (from.fd < 0) return absl::InvalidArgumentError(absl::StrCat("fd ", from.fd));
      to->fd = from.fd;
      to->fd_offset_bytes = from.offset_bytes;
      return absl::OkStatus();
    case KVMILL_REGION_DEVICE_IPC: {
      EngineDeviceMemory& memory = to->device_memory.emplace();
      static_assert(sizeof(memory.handle) == sizeof(from.handle) &&
                    sizeof(memory.device) == sizeof(from.device));
      std::memcpy(memory.handle.data(), from.handle, sizeof(from.handle));
      std::memcpy(memory.device.data(), from.device, sizeof(from.device));
      memory.allocation_bytes = from.allocation_bytes;
      memory.offset_bytes = from.offset_bytes;
      return absl::OkStatus();
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat("kind ", from.kind, ", want 0 to 2"));
  }
}

absl::Status ReadLayers(const kvmill_engine_layers& from, EngineLayers* to) {
  if (from.layer_count > kLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer_count ", from.layer_count, ", at most ", kLayersMax));
  }
  if (from.layer_count > 0 && from.keys == nullptr) return Null("keys");
  KVMILL_RETURN_IF_ERROR(ToEnum("element", from.element, EngineElement::kRecords, &to->element));
  KVMILL_RETURN_IF_ERROR(ReadPlaces("key", from.keys, from.layer_count, &to->keys));
  if (from.values != nullptr) {
    KVMILL_RETURN_IF_ERROR(ReadPlaces("value", from.values, from.layer_count, &to->values));
  }
  to->page_count = from.page_count;
  to->page_bytes = from.page_bytes;
  to->page_stride_bytes = from.page_stride_bytes;
  to->token_stride_bytes = from.token_stride_bytes;
  to->head_stride_bytes = from.head_stride_bytes;
  to->group = from.group;
  to->layer_begin = from.layer_begin;
  to->block_tokens = from.block_tokens;
  to->head_dim = from.head_dim;
  to->head_begin = from.head_begin;
  to->head_count = from.head_count;
  to->page_tokens = from.page_tokens;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<EngineGeometry> GeometryOf(const kvmill_engine_geometry* in) {
  kvmill_engine_geometry from;
  constexpr std::size_t kLeast =
      offsetof(kvmill_engine_geometry, layers_count) + sizeof(from.layers_count);
  KVMILL_RETURN_IF_ERROR(ReadStruct("geometry", in, kLeast, &from));
  if (from.region_count > kEngineRegionsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("region_count ", from.region_count, ", at most ", kEngineRegionsMax));
  }
  if (from.region_count > 0 && from.regions == nullptr) return Null("regions");
  if (from.layers_count > kEngineLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("layers_count ", from.layers_count, ", at most ", kEngineLayersMax));
  }
  EngineGeometry to;
  for (std::size_t i = 0; i < from.region_count; ++i) {
    to.regions.push_back({from.regions[i].base, from.regions[i].bytes});
  }
  if (from.source_count != 0 && from.source_count != from.region_count) {
    return absl::InvalidArgumentError(absl::StrCat("source_count ", from.source_count, ", want ",
                                                   from.region_count, ", one a region, or 0"));
  }
  const auto add_source = [&to](std::size_t i, const kvmill_region_source& source) {
    const absl::Status status = ReadSource(source, &to.regions[i]);
    return status.ok()
               ? status
               : absl::Status(status.code(), absl::StrCat("source ", i, ": ", status.message()));
  };
  constexpr std::size_t kSourceLeast = offsetof(kvmill_region_source, device) + 16;
  KVMILL_RETURN_IF_ERROR(
      ReadArray("sources", from.sources, from.source_count, kSourceLeast, add_source));
  if (from.assembling_boot_id != nullptr) {
    const std::size_t bytes = strnlen(from.assembling_boot_id, kBootIdBytesMax + 1);
    if (bytes > kBootIdBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("assembling_boot_id is longer than ", kBootIdBytesMax, " characters"));
    }
    to.assembling_boot_id.assign(from.assembling_boot_id, bytes);
  }
  const auto add_layers = [&to](std::size_t i, const kvmill_engine_layers& layers) {
    const absl::Status status = ReadLayers(layers, &to.layers.emplace_back());
    return status.ok()
               ? status
               : absl::Status(status.code(), absl::StrCat("layers ", i, ": ", status.message()));
  };
  constexpr std::size_t kLayersLeast =
      offsetof(kvmill_engine_layers, page_tokens) + sizeof(std::uint32_t);
  KVMILL_RETURN_IF_ERROR(
      ReadArray("layers", from.layers, from.layers_count, kLayersLeast, add_layers));
  return to;
}

}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

kvmill_code kvmill_register_memory(kvmill_client* client, const kvmill_namespace* ns,
                                   const kvmill_engine_geometry* geometry,
                                   const kvmill_call_options* call, kvmill_queue* queue,
                                   uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(const EngineGeometry to, GeometryOf(geometry));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_REGISTER_MEMORY, client, call, queue, tag));
    return operation.Start<std::uint64_t>([&](const CallOptions& options, auto done) {
      client->client->RegisterMemoryAsync(ns->data->ns, to, options, std::move(done));
    });
  });
}

kvmill_code kvmill_unregister_memory(kvmill_client* client, uint64_t registration,
                                     const kvmill_call_options* call, kvmill_queue* queue,
                                     uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_UNREGISTER_MEMORY, client, call, queue, tag));
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->UnregisterMemoryAsync(registration, options, [done](const absl::Status& s) {
        done(s.ok() ? absl::StatusOr<std::monostate>(std::monostate()) : s);
      });
    });
  });
}

}  // extern "C"
