#include "tests/service/data_plane_world.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill::testing {
namespace {

using stress::Space;

constexpr int kIdleTurnsMax = 2000;  // Some minutes.
constexpr std::int64_t kWindowNanos = 20'000;
constexpr int kWindowDoublings = 12;
constexpr std::uint64_t kTurnsMax = 2'000'000;
constexpr std::chrono::seconds kOperationTime{3};

const stress::Model& TheModel() {
  static const auto* model = new stress::Model(0);
  return *model;
}

// What a ServiceContext wants, and the data plane has no use for: nobody comes through this door.
struct Surroundings {
  Surroundings() {
    std::string pattern = ::testing::TempDir() + "kvmill-plane-XXXXXX";
    base = mkdtemp(pattern.data());
    LocalDoor::Options options;
    options.path = base + "/kvmill.sock.door";
    door = *LocalDoor::Create(options, SystemClock());
    callers = std::make_unique<Callers>(peers, *door, geteuid());
    std::filesystem::remove_all(base);
  }
  std::string base;
  LocalPeers peers;
  std::unique_ptr<LocalDoor> door;
  std::unique_ptr<Callers> callers;
  // Of no daemon: links get their connections from the test.
  Connection connection{*ParseServerAddress("127.0.0.1:1"), {}, [](std::uint64_t) {}};
};
Surroundings& TheSurroundings() {
  static auto* surroundings = new Surroundings;
  return *surroundings;
}

NodeIdentity IdentityOf(const std::string& name) {
  NodeIdentity identity;
  identity.id = NodeIdentity::IdOf(name);
  identity.incarnation = 1;
  return identity;
}

}  // namespace

class World::Sink : public FetchSink {
 public:
  Sink(Space space, std::vector<std::string> sequences, bool own_memory)
      : space_(space), sequences_(std::move(sequences)), own_memory_(own_memory) {}

  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    EXPECT_FALSE(done_) << "a sink is asked for memory after its fetch";
    if (!own_memory_) return {};
    std::vector<std::byte>& page = memory_[{id.block, id.group, id.layer_index}];
    page.resize(page_bytes);
    return absl::MakeSpan(page);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    EXPECT_FALSE(done_) << "a page comes after the end of its fetch";
    const std::string& sequence = sequences_[id.block / stress::kBlocks];
    EXPECT_EQ(
        TheModel().Matching(space_, sequence, id.block % stress::kBlocks, /*variants=*/1, page), 1u)
        << sequence << " block " << id.block << " group " << int{id.group} << " layer "
        << id.layer_index << " has bytes that nobody stored";
    ++pages_[id.block];
    return absl::OkStatus();
  }
  std::uint32_t pages(std::uint32_t block) { return pages_[block]; }

  void Done() {
    done_ = true;
    for (auto& [id, page] : memory_) std::memset(page.data(), 0xEE, page.size());
  }
  void ExpectLeftAlone() const {
    for (const auto& [id, page] : memory_) {
      EXPECT_TRUE(std::all_of(page.begin(), page.end(), [](std::byte b) {
        return b == std::byte{0xEE};
      })) << "memory is written to after the end of its fetch";
    }
  }

 private:
  const Space space_;
  const std::vector<std::string> sequences_;
  const bool own_memory_;
  bool done_ = false;
  std::map<std::uint32_t, std::uint32_t> pages_;
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::vector<std::byte>> memory_;
};

struct World::Operation {
  Space space{};
  std::vector<std::string> sequences;
  int done = 0;
  bool all_must_be_there = false;
  std::unique_ptr<Sink> sink;  // Of a fetch,
  std::vector<BlockKey> keys;
  // and of a store: values of its own, spoiled when it is done.
  bool whole = false;
  std::vector<std::vector<std::byte>> values;
  std::vector<LayerInput> layers;
  std::vector<StoreBlock> blocks;
};

World::World(std::uint64_t seed, bool plaintext, std::size_t peers, std::uint32_t segment_bytes,
             HiddenDevice* gpu)
    : network_(seed), random_(seed ^ 0x9E3779B97F4A7C15u), plaintext_(plaintext) {
  TieredStore::Options options;
  options.host_bytes = std::uint64_t{64} << 20;
  options.arena_bytes = std::uint64_t{16} << 20;
  options.blocks_max = 1 << 12;
  options.prefault = false;
  if (gpu != nullptr) {
    options.gpu = gpu;
    options.gpu_bytes = std::uint64_t{32} << 20;
    options.gpu_arena_bytes = std::uint64_t{16} << 20;
    network_.set_nature(
        {.copy_device = [gpu](std::byte* to, const std::byte* from, std::size_t bytes) {
          std::byte* const real_to = gpu->Real(to);
          const std::byte* const real_from = gpu->Real(from);
          std::memcpy(real_to != nullptr ? real_to : to, real_from != nullptr ? real_from : from,
                      bytes);
        }});
  }
  store_ = *TieredStore::Create(options, network_.clock(), nullptr);
  sessions_ = std::make_unique<SessionTable>(SessionTable::Options(), network_.clock());
  context_.reset(new ServiceContext{.store = *store_,
                                    .encode_pool = pool_,
                                    .io_pool = pool_,
                                    .clock = network_.clock(),
                                    .callers = *TheSurroundings().callers,
                                    .sessions = *sessions_});
  DataPlane::Options plane;
  plane.self = IdentityOf("node");
  plane.plaintext = plaintext;
  plane_ = *DataPlane::Start(
      *context_, plane,
      [&](TransportOptions transport) -> absl::StatusOr<std::unique_ptr<Transport>> {
        transport.limits.segment_bytes_max = segment_bytes;
        transport.grace_nanos = 100 * kMilli;
        auto made = network_.MakeTransport(transport, "node");
        server_ = made->get();
        return made;
      });
  for (const Space space : {Space::kTiles, Space::kRaw}) {
    NamespaceSpec spec = stress::SpecOf(space);
    spec.tenant = kDefaultTenant;
    const auto opened = store_->OpenNamespace(stress::NameOf(space), spec);
    ClientNamespace& ns = spaces_[static_cast<std::size_t>(space)];
    ns.name = opened->name;
    ns.fingerprint = opened->fingerprint;
    ns.spec = stress::SpecOf(space);
  }
  for (std::size_t i = 0; i < peers; ++i) {
    auto peer = std::make_unique<Peer>();
    peer->address = absl::StrCat("client", i);
    peer->self = IdentityOf(peer->address);
    peer->caller = {kDefaultTenant, 10 + i};
    TransportOptions transport;
    transport.self = peer->self;
    transport.plaintext = plaintext;
    transport.limits.segment_bytes_max = segment_bytes;
    transport.limits.waiting_calls_max = 16384;
    transport.grace_nanos = 100 * kMilli;
    peer->transport = *network_.MakeTransport(transport, peer->address);
    peer->link = std::make_unique<DataLink>(TheSurroundings().connection, pool_,
                                            DataLink::Options{.plaintext = plaintext},
                                            /*ask=*/nullptr);
    peers_.push_back(std::move(peer));
  }
}

World::~World() = default;

bool World::Run(const std::function<bool()>& over, const std::function<void()>& act) {
  std::promise<bool> ended;
  over_ = &over;
  act_ = &act;
  idle_turns_ = 0;
  turns_ = 0;
  ended_ = [&ended](bool reached) { ended.set_value(reached); };
  pool_.Post([this] { Turn(); });
  return ended.get_future().get();
}

bool World::RunFor(std::int64_t nanos) {
  const std::int64_t end = network_.clock().MonotonicNanos() + nanos;
  return Run([&] { return network_.clock().MonotonicNanos() >= end; });
}

void World::Turn() {
  const bool reached = (*over_)();
  if (reached || idle_turns_ > kIdleTurnsMax || ++turns_ > kTurnsMax) return ended_(reached);
  // Time does not pass over tasks that wait: only when nothing happened for some turns it goes by
  // more than a little.
  const std::int64_t window = kWindowNanos << std::min(idle_turns_, kWindowDoublings);
  const std::uint64_t steps_max = 1 + Below(4);
  std::uint64_t steps = 0;
  if (network_.RunUntil([&] { return steps++ == steps_max; }, window)) {
    idle_turns_ = 0;
  } else {
    if (steps > 1) idle_turns_ = 0;
    network_.RunFor(window);
    ++idle_turns_;
  }
  if (*act_) (*act_)();
  pool_.Post([this] { Turn(); });
}

void World::Connect(Peer& peer) {
  if (peer.connecting || peer.connection != nullptr) return;
  absl::StatusOr<Offer> offer =
      plane_->MakeOffer(peer.caller, peer.address, peer.self.id, {"10.0.0.1"});
  if (!offer.ok()) {  // Handshakes that failed left too many: they end in time.
    EXPECT_TRUE(absl::IsResourceExhausted(offer.status())) << offer.status();
    return;
  }
  peer.connecting = true;
  ++did_["connect"];
  Transport::Connecting connecting;
  connecting.done = [&peer](const absl::StatusOr<ConnectionPtr>& made) {
    peer.connecting = false;
    if (made.ok()) peer.connection = *made;
  };
  connecting.closed = [&peer](const absl::Status&) { peer.connection = nullptr; };
  peer.transport->Connect(*std::move(offer), std::move(connecting));
}

void World::CheckFailure(const absl::Status& status, const char* how) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kDataLoss:
      ++did_[absl::StrCat(how, " ", absl::StatusCodeToString(status.code()))];
      return;
    default:
      ADD_FAILURE() << how << ": " << status;
  }
}

void World::Done(Operation& operation, const absl::Status& status) {
  EXPECT_EQ(++operation.done, 1) << "an operation completed again";
  --running_;
  if (status.ok()) ++did_["ok"];
}

void World::Store(Peer& peer, Space space, const std::string& sequence,
                  stress::StoreInput::Heads heads, bool encode) {
  const stress::StoreInput input(TheModel(), space, sequence, 0, heads);
  operations_.push_back(std::make_unique<Operation>());
  Operation& operation = *operations_.back();
  operation.space = space;
  operation.sequences = {sequence};
  operation.whole = heads.count == stress::kHeads;
  operation.blocks.assign(input.blocks().begin(), input.blocks().end());
  operation.layers.reserve(operation.blocks.size() * stress::kLayers);
  const auto own = [&](KvView view, std::uint32_t tokens) {
    const std::size_t bytes = static_cast<std::size_t>(view.token_stride_bytes) * tokens;
    // To the end of the last token's heads: of a rank, less than a token's stride.
    const std::size_t used = bytes - std::size_t{2} * stress::kHeadDim * heads.begin;
    operation.values.emplace_back(view.data, view.data + used);
    view.data = operation.values.back().data();
    return view;
  };
  for (StoreBlock& block : operation.blocks) {
    const std::size_t first = operation.layers.size();
    for (const LayerInput& layer : block.layers) {
      operation.layers.push_back(
          {own(layer.k, block.token_count), own(layer.v, block.token_count)});
    }
    block.layers = absl::MakeConstSpan(operation.layers).subspan(first);
  }
  ASSERT_TRUE(peer.link->Begin());
  ++running_;
  ++did_["store"];
  StoreOptions options;
  options.head_begin = heads.begin;
  options.head_count = operation.whole ? 0 : heads.count;
  StartDataStore(
      *peer.link, peer.connection, this->space(space), operation.blocks, options, encode,
      std::chrono::system_clock::now() + kOperationTime,
      [this, &operation](const absl::StatusOr<StoreResult>& result) { Stored(operation, result); });
}

void World::Stored(Operation& operation, const absl::StatusOr<StoreResult>& result) {
  for (std::vector<std::byte>& values : operation.values) {
    std::memset(values.data(), 0x11, values.size());
  }
  if (!result.ok()) {
    CheckFailure(result.status(), "store");
    return Done(operation, result.status());
  }
  bool all = true;
  EXPECT_EQ(result->blocks.size(), stress::kBlocks);
  for (const StoreBlockResult& block : result->blocks) {
    if (!block.status.ok() &&
        !absl::IsCancelled(block.status)) {  // Of a call whose caller is gone.
      ADD_FAILURE() << "store block: " << block.status;
    }
    if (operation.whole) {
      EXPECT_NE(block.outcome, StoreOutcome::kPartial) << "of a store of all heads";
    }
    all =
        all && (block.outcome == StoreOutcome::kStored || block.outcome == StoreOutcome::kExisting);
  }
  if (all) known_.insert({static_cast<int>(operation.space), operation.sequences[0]});
  Done(operation, absl::OkStatus());
}

void World::Fetch(Peer& peer, Space space, const std::vector<std::string>& sequences) {
  operations_.push_back(std::make_unique<Operation>());
  Operation& operation = *operations_.back();
  operation.space = space;
  operation.sequences = sequences;
  operation.all_must_be_there =
      std::all_of(sequences.begin(), sequences.end(), [&](const std::string& sequence) {
        return known_.count({static_cast<int>(space), sequence}) > 0;
      });
  operation.sink = std::make_unique<Sink>(space, sequences, Below(2) == 0);
  for (const std::string& sequence : sequences) {
    const std::vector<BlockKey> keys = stress::KeysOf(sequence);
    operation.keys.insert(operation.keys.end(), keys.begin(), keys.end());
  }
  ASSERT_TRUE(peer.link->Begin());
  ++running_;
  ++did_["fetch"];
  StartDataFetch(*peer.link, peer.connection,
                 std::make_shared<const ClientNamespace>(this->space(space)), operation.keys,
                 *operation.sink, Elsewhere(), std::chrono::system_clock::now() + kOperationTime,
                 nullptr, [this, &operation](const absl::StatusOr<FetchResult>& result) {
                   Fetched(operation, result);
                 });
}

void World::Fetched(Operation& operation, const absl::StatusOr<FetchResult>& result) {
  operation.sink->Done();
  if (!result.ok()) {
    CheckFailure(result.status(), "fetch");
    return Done(operation, result.status());
  }
  EXPECT_EQ(result->blocks.size(), operation.keys.size());
  for (std::uint32_t b = 0; b < result->blocks.size(); ++b) {
    const absl::Status& status = result->blocks[b].status;
    if (status.ok()) {
      EXPECT_EQ(operation.sink->pages(b), stress::kLayers) << "block " << b;
      ++did_["fetched blocks"];
    } else {
      // Damage that only checksums of pages can find costs the block.
      EXPECT_TRUE(absl::IsNotFound(status) && !operation.all_must_be_there) << status;
    }
  }
  Done(operation, absl::OkStatus());
}

void World::FetchAllThatIsKnown(Peer& peer) {
  for (const auto& [space, sequence] : known_) {
    Fetch(peer, static_cast<Space>(space), {sequence});
  }
}

void World::Finish() {
  EXPECT_TRUE(Run([&] { return running_ == 0; })) << "operations that never end: " << running_;
  EXPECT_TRUE(Run([&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [](const auto& peer) { return peer->connecting; });
  }));
  bool hung_up = false;
  EXPECT_TRUE(Run([&] { return hung_up && server_->stats().connections == 0; },
                  [&] {
                    if (std::exchange(hung_up, true)) return;
                    for (const auto& peer : peers_) {
                      if (peer->connection != nullptr) peer->connection->Close();
                    }
                  }));
  // Offers that nobody used last a minute.
  EXPECT_TRUE(RunFor(62 * kSecond));
  const DataPlane::Stats left = plane_->stats();
  EXPECT_EQ(left.connections, 0u);
  EXPECT_EQ(left.hosts, 0u);
  EXPECT_EQ(left.calls, 0u);
  EXPECT_EQ(left.staging_bytes, 0u);
  EXPECT_EQ(store_->stats().references, 0u);
  for (const auto& peer : peers_) {
    const TransportStats stats = peer->transport->stats();
    EXPECT_EQ(stats.connections + stats.calls_started + stats.operations + stats.held_bytes, 0u)
        << peer->address;
  }
  const TransportStats stats = server_->stats();
  EXPECT_EQ(stats.offers, 0u);
  EXPECT_EQ(stats.calls_served + stats.operations + stats.held_bytes, 0u);
  for (const std::unique_ptr<Operation>& operation : operations_) {
    EXPECT_EQ(operation->done, 1);
    if (operation->sink != nullptr) operation->sink->ExpectLeftAlone();
  }
  for (const auto& peer : peers_) peer->link->Stop();
  plane_.reset();
  for (const auto& peer : peers_) peer->transport.reset();
}

}  // namespace kvmill::testing
