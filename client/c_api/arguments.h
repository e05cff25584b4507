// Arguments of the C ABI as those of the client. Everything but K, V, records and page tables is
// copied. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_ARGUMENTS_H_
#define KVMILL_CLIENT_C_API_ARGUMENTS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c_api/queue.h"
#include "client/client.h"
#include "client/kvmill.h"
#include "client/kvmill_engine.h"
#include "client/request_context.h"

namespace kvmill::c_api {

// INVALID_ARGUMENT of all of them names `what`, value and limit. A key of 0 bytes is an empty one.
absl::StatusOr<BlockKey> KeyOf(absl::string_view what, const kvmill_key& key);
// None of them is empty.
absl::StatusOr<std::vector<BlockKey>> KeysOf(const kvmill_key* keys, std::size_t count);
// Null: all defaults.
absl::StatusOr<Elsewhere> ElsewhereOf(const kvmill_elsewhere* given);
absl::StatusOr<std::vector<TailCandidate>> TailsOf(const kvmill_tail* tails, std::size_t count);
absl::StatusOr<NamespaceSpec> SpecOf(const kvmill_namespace_spec* in);
absl::StatusOr<EngineGeometry> GeometryOf(const kvmill_engine_geometry* in);  // geometry.cc

// What the call is known by; null: it says nothing. What is not valid is left out.
RequestPtr RequestOf(const kvmill_call_options& call);

// With an address.
absl::Status ReadClientOptions(absl::string_view name, const kvmill_client_options* in,
                               kvmill_client_options* out);
// Where session events go included.
absl::StatusOr<Client::Options> ClientOptionsOf(const kvmill_client_options& from);

struct StoreInputs final : Inputs {
  std::vector<StoreBlock> blocks;
  std::vector<LayerInput> layers;  // Of all blocks.
};

absl::StatusOr<std::unique_ptr<StoreInputs>> StoreInputsOf(const NamespaceData& ns,
                                                           const kvmill_store_block* blocks,
                                                           std::size_t block_count,
                                                           const kvmill_store_options& options);

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_ARGUMENTS_H_
