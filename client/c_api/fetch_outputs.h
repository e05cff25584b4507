// The FetchSink behind kvmill_fetch. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_FETCH_OUTPUTS_H_
#define KVMILL_CLIENT_C_API_FETCH_OUTPUTS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/c_api/queue.h"
#include "client/client.h"

namespace kvmill::c_api {

class FetchOutputs final : public FetchSink {
 public:
  // `page_bytes` is null, or has room for every output: where the length of each page goes.
  FetchOutputs(std::shared_ptr<const NamespaceData> ns, const kvmill_fetch_options& options,
               std::vector<kvmill_fetch_output> outputs, std::vector<std::size_t>* page_bytes);

  // OK, or what is wrong with options and outputs.
  absl::Status Check(std::size_t key_count) const;

  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override;
  absl::Status OnPage(const PageId& id, const PageView& page) override;

 private:
  std::size_t IndexOf(const PageId& id) const;
  absl::Status Decode(const PageView& page, const kvmill_fetch_output& out);
  absl::Status CopyRecords(const PageView& page, const kvmill_fetch_output& out) const;

  const std::shared_ptr<const NamespaceData> ns_;
  const kvmill_fetch_options options_;
  const std::vector<kvmill_fetch_output> outputs_;
  std::vector<std::size_t>* const page_bytes_;
  std::vector<std::byte> scratch_;
};

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_FETCH_OUTPUTS_H_
