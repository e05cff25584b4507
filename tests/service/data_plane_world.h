// A daemon's data plane and clients of it over a simulated network, for tests: the DataPlane over a
// TieredStore on one side, DataFetch and DataStore on the other, everything else in between is the
// code that runs over UCX.
//
// All of it runs on one thread, that of a pool, which is also the pool of the encoders, of I/O and
// of the clients' workers: Turn takes some steps of the network, acts, and posts itself behind what
// these posted. So a run is a function of its seed (but for how long its calls may take: their
// deadlines are the machine's).
#ifndef KVMILL_TESTS_SERVICE_DATA_PLANE_WORLD_H_
#define KVMILL_TESTS_SERVICE_DATA_PLANE_WORLD_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "client/data_fetch.h"
#include "client/data_link.h"
#include "client/data_store.h"
#include "client/transport/fake_transport.h"
#include "service/data_plane.h"
#include "service/service_context.h"
#include "storage/core/worker_pool.h"
#include "tests/storage/hidden_device.h"
#include "tests/stress/stress_model.h"

namespace kvmill::testing {

inline constexpr std::int64_t kMilli = 1'000'000;
inline constexpr std::int64_t kSecond = 1'000'000'000;

class World {
 public:
  static constexpr std::size_t kPeers = 2;

  // `gpu`: of a tier of blocks, which the network can read. May be null; outlives it.
  World(std::uint64_t seed, bool plaintext, std::size_t peers = kPeers,
        std::uint32_t segment_bytes = 64 << 10, HiddenDevice* gpu = nullptr);
  ~World();  // After Finish.

  // What a client has.
  struct Peer {
    std::string address;
    NodeIdentity self;
    Caller caller;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<DataLink> link;
    ConnectionPtr connection;  // Null: none.
    bool connecting = false;
  };
  // Verifies and keeps pages; its memory must be left alone once the fetch is done.
  class Sink;
  struct Operation;

  // Until `over`, on the pool's thread: steps of the network, then `act`. False: nothing happens
  // any more, or too much does.
  bool Run(const std::function<bool()>& over, const std::function<void()>& act = nullptr);
  bool RunFor(std::int64_t nanos);
  // Of the pool's thread, as everything below. Asks for an offer and dials, unless there is a
  // connection.
  void Connect(Peer& peer);
  void Store(Peer& peer, stress::Space space, const std::string& sequence,
             stress::StoreInput::Heads heads, bool encode);
  void Fetch(Peer& peer, stress::Space space, const std::vector<std::string>& sequences);
  std::size_t running() const { return running_; }
  // Everything that a store said is there is there, and right.
  void FetchAllThatIsKnown(Peer& peer);

  // Not of the pool's thread: hangs up, lets time pass, and expects that nothing is left.
  void Finish();

  std::mt19937_64& random() { return random_; }
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  FakeNetwork& network() { return network_; }
  DataPlane& plane() { return *plane_; }
  TieredStore& store() { return *store_; }
  Peer& peer(std::size_t i) { return *peers_[i]; }
  std::size_t peers() const { return peers_.size(); }
  const ClientNamespace& space(stress::Space space) const {
    return spaces_[static_cast<std::size_t>(space)];
  }
  const std::map<std::string, std::uint64_t>& did() const { return did_; }

 private:
  void Turn();
  void CheckFailure(const absl::Status& status, const char* how);
  void Done(Operation& operation, const absl::Status& status);
  void Stored(Operation& operation, const absl::StatusOr<StoreResult>& result);
  void Fetched(Operation& operation, const absl::StatusOr<FetchResult>& result);

  FakeNetwork network_;
  std::mt19937_64 random_;
  const bool plaintext_;
  std::unique_ptr<TieredStore> store_;
  WorkerPool pool_{1, "world"};
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<ServiceContext> context_;
  Transport* server_ = nullptr;  // The plane's.
  std::unique_ptr<DataPlane> plane_;
  std::vector<std::unique_ptr<Peer>> peers_;
  ClientNamespace spaces_[stress::kSpaces];
  std::vector<std::unique_ptr<Operation>> operations_;  // All there were.
  std::size_t running_ = 0;
  std::set<std::pair<int, std::string>> known_;  // By space: each block of the sequence is there.
  std::map<std::string, std::uint64_t> did_;

  // Of Run.
  const std::function<bool()>* over_ = nullptr;
  const std::function<void()>* act_ = nullptr;
  std::function<void(bool)> ended_;
  int idle_turns_ = 0;
  std::uint64_t turns_ = 0;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_SERVICE_DATA_PLANE_WORLD_H_
