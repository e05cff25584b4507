#include "service/ticket_bytes.h"

#include "absl/strings/str_cat.h"
#include "service/cluster/ticket.h"

namespace kvmill {

absl::Status TicketBytes::Take(const std::string& tenant, std::uint64_t bytes) {
  MutexLock lock(mu_);
  if (tenant.empty()) {
    if (bytes > bytes_max_ - bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(what_, " ", bytes_, " bytes: ", bytes, " more would be above ", bytes_max_));
    }
    bytes_ += bytes;
    return absl::OkStatus();
  }
  const auto found = shares_.find(tenant);
  const std::uint64_t has = found == shares_.end() ? 0 : found->second;
  const std::uint64_t most = bytes_max_ / kTicketShares;
  if (bytes > most - has) {
    return absl::ResourceExhaustedError(absl::StrCat("of tenant \"", tenant, "\" ", what_, " ", has,
                                                     " bytes: ", bytes, " more would be above ",
                                                     most));
  }
  if (bytes > bytes_max_ - bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        what_, " all that they may, other tenants' too: no room for ", bytes, " bytes more"));
  }
  bytes_ += bytes;
  if (bytes > 0) shares_[tenant] += bytes;
  return absl::OkStatus();
}

void TicketBytes::GiveBack(const std::string& tenant, std::uint64_t bytes) {
  MutexLock lock(mu_);
  bytes_ -= bytes;
  const auto share = shares_.find(tenant);
  if (share == shares_.end()) return;
  share->second -= bytes;
  if (share->second == 0) shares_.erase(share);
}

}  // namespace kvmill
