// Mapped blocks as the C ABI has them. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_MAPPED_H_
#define KVMILL_CLIENT_C_API_MAPPED_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/c_api/queue.h"
#include "client/kvmill_map.h"
#include "client/mapped_blocks.h"

namespace kvmill::c_api {

// Constant once made, the blocks' leases apart.
struct MappedData {
  MappedData(const kvmill_client* client, std::shared_ptr<Device> device,
             std::shared_ptr<const NamespaceData> ns, std::unique_ptr<MappedBlocks> blocks);

  // By the layer's number over all groups. OUT_OF_RANGE for a block or a layer that does not exist.
  absl::StatusOr<PageView> Page(std::size_t block, std::size_t layer) const;

  const kvmill_client* const client;     // Compared, never used.
  const std::shared_ptr<Device> device;  // The client's; outlives the blocks.
  const std::shared_ptr<const NamespaceData> ns;
  const std::shared_ptr<MappedBlocks> blocks;  // Shared with renewals that run.
  std::vector<std::string> messages;           // Of the blocks' statuses.
};

}  // namespace kvmill::c_api

struct kvmill_mapped {
  std::shared_ptr<const kvmill::c_api::MappedData> data;
};

#endif  // KVMILL_CLIENT_C_API_MAPPED_H_
