// SessionTable: the memory of engines.
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/session_table.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<std::uint64_t> SessionTable::Register(const Caller& caller,
                                                     const std::string& session_id,
                                                     NamespaceId namespace_id,
                                                     const EngineGeometry& geometry) {
  auto memory = std::make_shared<EngineMemory>(namespace_id, geometry);
  MutexLock lock(mu_);
  KVMILL_ASSIGN_OR_RETURN(Session * session, Find(caller, session_id));
  if (session->registrations.size() >= options_.registrations_max) {
    return absl::ResourceExhaustedError(absl::StrCat(session->registrations.size(),
                                                     " registrations of one session: at most ",
                                                     options_.registrations_max));
  }
  const std::uint64_t registration = next_registration_++;
  session->registrations.insert(registration);
  registrations_.emplace(registration, Registration{session_id, std::move(memory)});
  ++stats_.registrations;
  return registration;
}

std::shared_ptr<EngineMemory> SessionTable::Forget(const Session& session,
                                                   std::uint64_t registration) {
  const auto it = registrations_.find(registration);
  std::shared_ptr<EngineMemory> memory = std::move(it->second.memory);
  registrations_.erase(it);
  --stats_.registrations;
  const auto shared = shared_.find(session.tenant);
  if (shared == shared_.end()) return memory;
  stats_.shared_regions -= memory->shared_regions();
  shared->second.regions -= memory->shared_regions();
  shared->second.bytes -= memory->shared_bytes();
  if (shared->second.regions == 0) shared_.erase(shared);
  return memory;
}

absl::StatusOr<bool> SessionTable::Unregister(const Caller& caller, const std::string& session_id,
                                              std::uint64_t registration,
                                              PageReaders::Answer answer) {
  std::shared_ptr<EngineMemory> memory;  // Unmapped without the lock.
  {
    MutexLock lock(mu_);
    KVMILL_ASSIGN_OR_RETURN(Session * session, Find(caller, session_id));
    if (session->registrations.erase(registration) == 0) return false;
    memory = Forget(*session, registration);
  }
  page_readers_.CancelRegistration(registration, std::move(answer));
  return true;
}

absl::Status SessionTable::CheckOwner(DoorClientId client, std::uint64_t registration) const {
  const auto it = registrations_.find(registration);
  if (it != registrations_.end() && sessions_.at(it->second.session)->client == client) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(
      absl::StrCat("registration ", registration, " is not one of this client"));
}

absl::StatusOr<std::shared_ptr<const EngineMemory>> SessionTable::MemoryOf(
    DoorClientId client, std::uint64_t registration) const {
  MutexLock lock(mu_);
  KVMILL_RETURN_IF_ERROR(CheckOwner(client, registration));
  return std::shared_ptr<const EngineMemory>(registrations_.at(registration).memory);
}

absl::Status SessionTable::Share(DoorClientId client, std::uint64_t registration,
                                 std::uint32_t region, std::unique_ptr<const SharedRegion> memory) {
  const std::uint64_t bytes = memory->bytes();
  MutexLock lock(mu_);
  KVMILL_RETURN_IF_ERROR(CheckOwner(client, registration));
  const Registration& to = registrations_.at(registration);
  const Session* const session = sessions_.at(to.session).get();
  const auto full = [](absl::string_view what, std::uint64_t used, std::uint64_t more,
                       std::uint64_t max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(used, " ", what, " and ", more, " more: at most ", max));
  };
  const auto of_tenant = shared_.find(session->tenant);
  const Shared used = of_tenant == shared_.end() ? Shared{} : of_tenant->second;
  if (stats_.shared_regions >= options_.shared_regions_max) {
    return full("shared regions", stats_.shared_regions, 1, options_.shared_regions_max);
  }
  if (used.regions >= options_.shared_regions_of_tenant_max) {
    return full("shared regions of one tenant", used.regions, 1,
                options_.shared_regions_of_tenant_max);
  }
  if (bytes > options_.shared_bytes_of_tenant_max - used.bytes) {
    return full("shared bytes of one tenant", used.bytes, bytes,
                options_.shared_bytes_of_tenant_max);
  }
  KVMILL_RETURN_IF_ERROR(to.memory->Share(region, &memory));
  shared_[session->tenant] = {used.regions + 1, used.bytes + bytes};
  ++stats_.shared_regions;
  return absl::OkStatus();
}

absl::StatusOr<SessionTable::PageStore> SessionTable::BeginPageStore(const Caller& caller,
                                                                     const std::string& session_id,
                                                                     std::uint64_t registration,
                                                                     NamespaceId namespace_id,
                                                                     std::uint64_t number) {
  // Under the lock: a session that ends cancels every store that began.
  MutexLock lock(mu_);
  KVMILL_ASSIGN_OR_RETURN(Session * session, Find(caller, session_id));
  if (!session->registrations.contains(registration)) {
    return absl::NotFoundError(
        absl::StrCat("registration ", registration, " is not one of this session"));
  }
  PageStore store;
  store.memory = registrations_.at(registration).memory;
  if (store.memory->namespace_id() != namespace_id) {
    return absl::InvalidArgumentError(
        absl::StrCat("registration ", registration, " is of another namespace"));
  }
  KVMILL_ASSIGN_OR_RETURN(store.reads,
                          page_readers_.Begin(session->tenant, session_id, number, registration));
  return store;
}

}  // namespace kvmill
