// Sessions and what they hold: the one owner of everything that is kept for a client.
//
// A state machine over a clock; it has no thread. A session is opened by an Engine.Session stream.
// It ends
//   - when the client closes it,
//   - for a local client when that client leaves the local door, whatever becomes of the stream
//     meanwhile,
//   - for a remote one when its stream broke, or went silent, and nobody resumed the session by its
//     id within the grace.
// With it end its leases, its registrations and its stores of pages; the mappings of registered
// memory go when the last read of them has ended.
//
// A lease holds one block (of one layer group) from the grant until it is released, its session
// ends, or its time is over. Then it is expired, once and for all; the block is let go a grace
// later, since a reader that looked at its watch just before may still be reading.
//
// Thread-safe. Blocks are let go and listeners called without a lock.
#ifndef KVMILL_SERVICE_SESSION_TABLE_H_
#define KVMILL_SERVICE_SESSION_TABLE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/engine_geometry.h"
#include "service/callers.h"
#include "service/engine_memory.h"
#include "service/page_readers.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

using LeaseId = std::uint64_t;  // Of this daemon's life. Never used again. From 1.

// Told about a session by the table; the stream behind it. Calls come from any thread, without a
// lock of the table, and must not block.
class SessionListener {
 public:
  virtual ~SessionListener() = default;
  virtual void OnLeasesExpired(const std::vector<LeaseId>& leases) = 0;
  // The daemon drains: new sessions and stores go elsewhere.
  virtual void OnDrain() = 0;
  // The last call: the stream has nothing to do with the session any more.
  virtual void OnEnd(const absl::Status& why) = 0;
};

class SessionTable {
 public:
  struct Options {
    std::uint32_t local_sessions_max = 4096;
    std::uint32_t sessions_of_client_max = 16;  // Of one local client.
    std::uint32_t remote_sessions_max = 1024;
    std::uint32_t leases_max = 65536;  // Of one session.
    std::uint32_t registrations_max = 64;
    // Of shared memory: mappings and address space are finite.
    std::uint64_t shared_regions_max = 16384;
    std::uint64_t shared_regions_of_tenant_max = 4096;
    std::uint64_t shared_bytes_of_tenant_max = std::uint64_t{4} << 40;
    // Of all sessions together, in host memory and on the GPU.
    std::uint64_t leased_bytes_max = ~std::uint64_t{0};
    std::uint64_t leased_gpu_bytes_max = ~std::uint64_t{0};
    std::int64_t lease_nanos_max = 60'000'000'000;
    std::int64_t lease_grace_nanos = 250'000'000;
    std::int64_t resume_grace_nanos = 30'000'000'000;
    // A remote stream that says nothing for so long is as good as broken.
    std::int64_t silence_nanos_max = 15'000'000'000;
  };

  SessionTable(const Options& options, const Clock& clock)
      : options_(options), clock_(clock), resume_grace_nanos_(options.resume_grace_nanos) {}
  // Every session ends.
  ~SessionTable();

  const Options& options() const { return options_; }
  // Options::resume_grace_nanos, from now on: of the sessions there are, too.
  void SetResumeGrace(std::int64_t nanos) {
    resume_grace_nanos_.store(nanos, std::memory_order_relaxed);
  }
  std::int64_t resume_grace_nanos() const {
    return resume_grace_nanos_.load(std::memory_order_relaxed);
  }

  // Who else keeps something for sessions is told when one has ended, on any thread. Before the
  // first session.
  void SetEnded(std::function<void(const std::string& session_id)> ended) {
    ended_ = std::move(ended);
  }
  // OK: the caller has this session. ABORTED as Find.
  absl::Status Check(const Caller& caller, const std::string& session_id);

  // Of the local door.
  void ClientEntered(DoorClientId client);
  void ClientLeft(DoorClientId client);

  // Opens a session, or with `resume_id` goes on with one of this caller: a new stream in place of
  // the one that broke. NOT_FOUND: there is no such session (any more). RESOURCE_EXHAUSTED names
  // the limit.
  absl::StatusOr<std::string> Open(const Caller& caller, absl::string_view resume_id,
                                   std::shared_ptr<SessionListener> listener);
  // The stream lives.
  void Heard(const std::string& id, const SessionListener* listener);
  // The stream broke. Ignored, as is Close, when another one took the session over.
  void Detach(const std::string& id, const SessionListener* listener);
  // The client has done with the session.
  void Close(const std::string& id, const SessionListener* listener);

  // Leases on these blocks, numbered one after the other from the returned one. ABORTED: there is
  // no such session of this caller; FAILED_PRECONDITION: it is not a local one; INVALID_ARGUMENT:
  // `lease_nanos`; RESOURCE_EXHAUSTED: too many leases. Numbers and limits are named.
  absl::StatusOr<LeaseId> Grant(const Caller& caller, const std::string& session_id,
                                std::int64_t lease_nanos, std::vector<BlockRef> blocks);
  // The leases last `lease_nanos` from now. One answer a lease: false when the session does not
  // hold it (any more).
  absl::StatusOr<std::vector<bool>> Renew(const Caller& caller, const std::string& session_id,
                                          absl::Span<const LeaseId> leases,
                                          std::int64_t lease_nanos);
  // The number of them that the session held.
  absl::StatusOr<std::uint64_t> Release(const Caller& caller, const std::string& session_id,
                                        absl::Span<const LeaseId> leases);
  // Calls `use` with the block of a lease that a session of this local client holds. The block
  // stays during the call, which must not block. False when there is none.
  bool WithLease(DoorClientId client, LeaseId lease, absl::FunctionRef<void(const BlockRef&)> use);

  // Memory of the caller's engine: `geometry` was checked against the namespace.
  // RESOURCE_EXHAUSTED, ABORTED.
  absl::StatusOr<std::uint64_t> Register(const Caller& caller, const std::string& session_id,
                                         NamespaceId namespace_id, const EngineGeometry& geometry);
  // False when the session has no such registration. Else its stores of pages are cancelled, and
  // `answer` is called, once, when none of them reads.
  absl::StatusOr<bool> Unregister(const Caller& caller, const std::string& session_id,
                                  std::uint64_t registration, PageReaders::Answer answer);
  // What this local client registered. NOT_FOUND: not its registration.
  absl::StatusOr<std::shared_ptr<const EngineMemory>> MemoryOf(DoorClientId client,
                                                               std::uint64_t registration) const;
  // Memory of a region that this local client registered. NOT_FOUND: not its registration;
  // RESOURCE_EXHAUSTED: too much is shared; INVALID_ARGUMENT, ALREADY_EXISTS: see EngineMemory.
  absl::Status Share(DoorClientId client, std::uint64_t registration, std::uint32_t region,
                     std::unique_ptr<const SharedRegion> memory);
  // A store of pages of a registration. NOT_FOUND, ABORTED, ALREADY_EXISTS; INVALID_ARGUMENT when
  // it is of another namespace.
  struct PageStore {
    std::shared_ptr<const EngineMemory> memory;
    PageReaders::StorePtr reads;
  };
  absl::StatusOr<PageStore> BeginPageStore(const Caller& caller, const std::string& session_id,
                                           std::uint64_t registration, NamespaceId namespace_id,
                                           std::uint64_t number);
  PageReaders& page_readers() { return page_readers_; }

  // Does what is due. To be called a few times in a lease grace.
  void Advance();
  // Tells everybody.
  void Drain();
  // Ends every session, with ABORTED and the text of `why`: none of them can be resumed. No other
  // one begins: Open answers with `why`.
  void Stop(const absl::Status& why);

  struct Stats {
    std::uint64_t sessions = 0;
    std::uint64_t leases = 0;        // Granted, and neither expired nor released.
    std::uint64_t leased_bytes = 0;  // Of their blocks.
    std::uint64_t lease_expirations = 0;
    std::uint64_t registrations = 0;
    std::uint64_t shared_regions = 0;  // Of registrations.
  };
  Stats stats() const;
  Stats StatsOf(const std::string& tenant) const;

 private:
  struct Lease {
    BlockRef block;  // Not valid: released, or let go after the expiry.
    std::int64_t deadline_nanos = 0;
    std::uint64_t bytes = 0;
    bool on_gpu = false;
    bool expired = false;
  };
  // The leases of one Grant: numbers first, first + 1, ...
  struct LeaseGroup {
    std::string session;
    std::vector<Lease> leases;
    std::size_t held = 0;  // With a valid block.
    std::int64_t due_nanos = 0;
  };
  struct Session {
    std::string tenant;
    DoorClientId client = 0;
    std::shared_ptr<SessionListener> listener;  // Null while the stream is broken.
    std::int64_t heard_nanos = 0;
    std::int64_t detached_nanos = 0;
    std::set<LeaseId> groups;  // First numbers.
    std::uint64_t lease_count = 0;
    std::uint64_t leased_bytes = 0;
    std::set<std::uint64_t> registrations;
  };
  struct Registration {
    std::string session;
    std::shared_ptr<EngineMemory> memory;  // Also of the stores that read it.
  };
  struct Shared {
    std::uint64_t regions = 0;
    std::uint64_t bytes = 0;
  };
  // What is done after the lock was given back.
  struct Aftermath {
    std::vector<BlockRef> blocks;
    std::vector<std::shared_ptr<EngineMemory>> memories;
    std::vector<std::pair<std::shared_ptr<SessionListener>, absl::Status>> ends;
    std::vector<std::pair<std::shared_ptr<SessionListener>, std::vector<LeaseId>>> expired;
    std::vector<std::string> ended;  // Sessions, for `tell`.
    const std::function<void(const std::string&)>* tell = nullptr;
    void Run();
  };
  using Sessions = absl::flat_hash_map<std::string, std::unique_ptr<Session>>;
  using Groups = std::map<LeaseId, LeaseGroup>;

  absl::Status CheckOwner(DoorClientId client, std::uint64_t registration) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Session*> Find(const Caller& caller, const std::string& session_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckRoom(const Caller& caller) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(Sessions::iterator session, const absl::Status& why, Aftermath* after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The lease, and its group, when a session with that id holds it; else null.
  Lease* FindLease(const std::string& session_id, LeaseId id, Groups::iterator* group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The memory of a registration, which is none any more.
  std::shared_ptr<EngineMemory> Forget(const Session& session, std::uint64_t registration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // No longer a lease: leaves the gauges.
  void Uncount(Session& session, const Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Erase(Groups::iterator group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AdvanceGroup(Groups::iterator group, std::int64_t now_nanos, Aftermath* after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Clock& clock_;
  std::atomic<std::int64_t> resume_grace_nanos_;  // A stale value is the one of before.
  PageReaders page_readers_;
  std::function<void(const std::string&)> ended_;  // May be null.

  mutable Mutex mu_;
  absl::flat_hash_set<DoorClientId> clients_ ABSL_GUARDED_BY(mu_);
  Sessions sessions_ ABSL_GUARDED_BY(mu_);
  std::uint64_t remote_sessions_ ABSL_GUARDED_BY(mu_) = 0;
  Groups groups_ ABSL_GUARDED_BY(mu_);
  // (when something of the group is due, its first number): one entry a group.
  std::set<std::pair<std::int64_t, LeaseId>> due_ ABSL_GUARDED_BY(mu_);
  absl::Status stopped_ ABSL_GUARDED_BY(mu_);
  LeaseId next_lease_ ABSL_GUARDED_BY(mu_) = 1;
  std::uint64_t next_registration_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<std::uint64_t, Registration> registrations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Shared> shared_ ABSL_GUARDED_BY(mu_);  // By tenant.
  Stats stats_ ABSL_GUARDED_BY(mu_);
  std::uint64_t leased_gpu_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // Among stats_.leased_bytes.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_SESSION_TABLE_H_
