// Headers of the data plane's calls that nobody should send: random ones, mutations of valid ones,
// damaged bytes, payloads of other lengths than they say. Each call ends once, with a documented
// code, and nothing is left. Prints its seed, --seed=N repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "kernels/tile_format.h"
#include "service/data_plane.h"
#include "tests/integration/message_mutator.h"
#include "tests/long_form.h"
#include "tests/service/data_plane_world.h"

namespace kvmill::testing {
namespace {

using stress::Space;

bool IsDocumented(absl::StatusCode code) {
  static const std::set<absl::StatusCode> codes = {
      absl::StatusCode::kOk,
      absl::StatusCode::kInvalidArgument,
      absl::StatusCode::kNotFound,
      absl::StatusCode::kFailedPrecondition,
      absl::StatusCode::kPermissionDenied,
      absl::StatusCode::kResourceExhausted,
      absl::StatusCode::kAborted,
      absl::StatusCode::kDataLoss,
  };
  return codes.count(code) != 0;
}

class Sender {
 public:
  Sender(World& world, std::uint64_t seed) : world_(world), mutator_(seed) {
    const ClientNamespace& ns = world.space(kSpace);
    mutator_.Know("fingerprint", std::string(AsBytes(ns.fingerprint)));
    for (const char* field : {"key", "keys", "parent"}) {
      for (int i = 0; i < 6; ++i) mutator_.Know(field, Key(i));
    }
    mutator_.Know("token_count", ns.spec.block_tokens);
    for (const char* field : {"layer_count", "head_count", "group", "groups", "first_group"}) {
      for (const std::uint64_t value : {0, 1, 2}) mutator_.Know(field, value);
    }
  }

  // On the pool's thread.
  void StartOne() {
    v1::DataRequest request = Valid();
    const std::uint64_t kind = mutator_.Below(100);
    if (kind >= 85) {
      request.Clear();
      mutator_.Fill(&request);
    } else if (kind >= 30) {
      mutator_.Mutate(&request, 1 + static_cast<int>(mutator_.Below(3)));
    }
    std::string bytes = request.SerializeAsString();
    if (kind >= 30 && mutator_.OneIn(5)) bytes = mutator_.Damage(bytes);
    bytes.resize(std::min(bytes.size(), std::size_t{kCallHeaderBytesMax}));
    std::size_t payload_bytes = payload_bytes_;
    if (kind >= 30 && mutator_.OneIn(6)) payload_bytes = mutator_.Below(payload_.size());
    Call call;
    call.header.resize(bytes.size());
    std::memcpy(call.header.data(), bytes.data(), bytes.size());
    call.payload = {absl::MakeConstSpan(payload_).first(payload_bytes)};
    call.timeout_nanos = 60 * kSecond;
    auto answer = std::make_shared<std::vector<std::byte>>();
    call.place = [answer](const ResponseHead& head, DestinationSpans* spans) {
      EXPECT_LE(head.payload_bytes, 2 * kFetchReplyBytes);
      answer->resize(head.payload_bytes);
      spans->push_back(absl::MakeSpan(*answer));
      return absl::OkStatus();
    };
    v1::DataRequest sent;
    const bool parses = sent.ParseFromString(bytes);
    const auto what = parses ? sent.request_case() : v1::DataRequest::REQUEST_NOT_SET;
    call.done = [this, answer, what, text = sent.ShortDebugString().substr(0, 1500),
                 ended = std::make_shared<bool>(false)](absl::StatusOr<Response> response) {
      SCOPED_TRACE(text);
      EXPECT_FALSE(std::exchange(*ended, true));
      ++done_;
      Check(what, response);
    };
    ++started_;
    world_.peer(0).connection->Start(std::move(call));
  }

  int started() const { return started_; }
  int done() const { return done_; }
  int right(v1::DataRequest::RequestCase what) const {
    const auto it = right_.find(what);
    return it == right_.end() ? 0 : it->second;
  }

 private:
  static constexpr Space kSpace = Space::kRaw;

  static std::string Key(int i) { return absl::StrCat("key of a block ", i); }

  v1::DataRequest Valid() {
    const ClientNamespace& ns = world_.space(kSpace);
    const std::string fingerprint(AsBytes(ns.fingerprint));
    v1::DataRequest request;
    payload_bytes_ = 0;
    switch (mutator_.Below(3)) {
      case 0:
        request.mutable_fetch()->set_fingerprint(fingerprint);
        for (int i = 0; i < 6; ++i) request.mutable_fetch()->add_keys(Key(i));
        break;
      case 1: {
        request.mutable_store()->set_fingerprint(fingerprint);
        const LayerGroup& group = ns.spec.groups[0];
        v1::StoreChunk& chunk = *request.mutable_store()->mutable_chunk();
        chunk.set_key(Key(static_cast<int>(mutator_.Below(6))));
        chunk.set_token_count(ns.spec.block_tokens);
        chunk.set_layer_count(static_cast<std::uint32_t>(group.layers.size()));
        chunk.set_head_count(group.kv_heads);
        payload_bytes_ = RawBytes(FormatOf(ns.spec, group), chunk.token_count()) *
                         chunk.layer_count() * chunk.head_count();
        break;
      }
      default:
        request.mutable_durable()->set_fingerprint(fingerprint);
        request.mutable_durable()->add_keys(Key(0));
        request.mutable_durable()->add_groups(0);
    }
    return request;
  }

  void Check(v1::DataRequest::RequestCase what, const absl::StatusOr<Response>& response) {
    EXPECT_TRUE(IsDocumented(response.status().code())) << response.status();
    EXPECT_EQ(response.ok(), response.status().message().empty()) << response.status();
    EXPECT_LE(response.status().message().size(), 2048u);
    if (!response.ok()) return;
    ++right_[what];
    EXPECT_LE(response->header.size(), std::size_t{kCallHeaderBytesMax});
    const int bytes = static_cast<int>(response->header.size());
    if (what == v1::DataRequest::kFetch) {
      v1::DataFetchReply reply;
      ASSERT_TRUE(reply.ParseFromArray(response->header.data(), bytes));
      EXPECT_GT(reply.groups_size(), 0);
      for (const v1::FetchReply& group : reply.groups()) {
        EXPECT_TRUE(IsDocumented(static_cast<absl::StatusCode>(group.status().code())));
      }
    } else if (what == v1::DataRequest::kStore) {
      v1::DataStoreReply reply;
      ASSERT_TRUE(reply.ParseFromArray(response->header.data(), bytes));
      const v1::StoreResult& result = reply.result();
      EXPECT_TRUE(IsDocumented(static_cast<absl::StatusCode>(result.status().code())));
      EXPECT_EQ(result.status().code() == 0, result.status().message().empty());
      EXPECT_EQ(result.status().code() == 0, result.outcome() != v1::STORE_FAILED);
    }
  }

  World& world_;
  MessageMutator mutator_;
  const std::vector<std::byte> payload_ = std::vector<std::byte>(2 * kDataChunkBytesMax);
  std::size_t payload_bytes_ = 0;  // Of the last Valid().
  int started_ = 0;
  int done_ = 0;
  std::map<v1::DataRequest::RequestCase, int> right_;
};

TEST(DataPlaneHostileTest, HeadersEndAsDocumentedAndLeaveNothing) {
  const std::uint64_t seed = SeedArgument();
  const int worlds = ShortOrLong(3, 100);
  for (int i = 0; i < worlds && !::testing::Test::HasFailure(); ++i) {
    World world(seed + static_cast<std::uint64_t>(i), i % 2 == 0, 1);
    Sender sender(world, seed + static_cast<std::uint64_t>(i));
    constexpr int kCalls = 400;
    EXPECT_TRUE(world.Run([&] { return sender.started() == kCalls && sender.done() == kCalls; },
                          [&] {
                            World::Peer& peer = world.peer(0);
                            world.Connect(peer);
                            if (peer.connection == nullptr) return;
                            const int waiting = sender.started() - sender.done();
                            if (sender.started() < kCalls && waiting < 20) sender.StartOne();
                          }));
    EXPECT_GT(sender.right(v1::DataRequest::kFetch), 20);
    EXPECT_GT(sender.right(v1::DataRequest::kStore), 20);
    world.Finish();
  }
}

// Numbers that would be others if they were cut to the width of their place.
TEST(DataPlaneHostileTest, LayerGroupsAreNotTakenModuloAnything) {
  World world(1, true, 1);
  std::vector<std::pair<std::uint32_t, absl::Status>> answers;
  bool asked = false;
  EXPECT_TRUE(world.Run(
      [&] { return answers.size() == 3; },
      [&] {
        World::Peer& peer = world.peer(0);
        world.Connect(peer);
        if (peer.connection == nullptr || std::exchange(asked, true)) return;
        for (const std::uint32_t group : {0u, 1u, 256u}) {
          v1::DataRequest request;
          v1::DataDurable& durable = *request.mutable_durable();
          durable.set_fingerprint(std::string(AsBytes(world.space(Space::kRaw).fingerprint)));
          durable.add_keys("a key");
          durable.add_groups(group);
          Call call;
          call.header.resize(request.ByteSizeLong());
          request.SerializeToArray(call.header.data(), static_cast<int>(call.header.size()));
          call.timeout_nanos = 60 * kSecond;
          call.done = [&answers, group](const absl::StatusOr<Response>& r) {
            answers.emplace_back(group, r.status());
          };
          peer.connection->Start(std::move(call));
        }
      }));
  for (const auto& [group, status] : answers) {
    const bool exists = group == 0;
    EXPECT_EQ(status.code() == absl::StatusCode::kInvalidArgument, !exists) << status;
    if (!exists) {
      EXPECT_EQ(std::string(status.message()),
                absl::StrCat("layer group ", group, ", want below 1"));
    }
  }
  world.Finish();
}

// What a later version adds is passed over, and what is wrong in a trace is left out: the call is
// served in either case.
TEST(DataPlaneHostileTest, WhatIsNotKnownOrWrongInAHeaderCostsNothing) {
  World world(1, true, 1);
  constexpr std::size_t kCalls = 3;
  std::vector<absl::Status> answers;
  bool asked = false;
  EXPECT_TRUE(world.Run(
      [&] { return answers.size() == kCalls; },
      [&] {
        World::Peer& peer = world.peer(0);
        world.Connect(peer);
        if (peer.connection == nullptr || std::exchange(asked, true)) return;
        for (std::size_t i = 0; i < kCalls; ++i) {
          v1::DataRequest request;
          v1::DataFetch& fetch = *request.mutable_fetch();
          fetch.set_fingerprint(std::string(AsBytes(world.space(Space::kRaw).fingerprint)));
          fetch.add_keys("a key");
          std::string header;
          if (i == 1) {
            request.mutable_trace()->set_request_id(std::string(100, '\xff'));
            request.mutable_trace()->set_traceparent("none");
          }
          request.SerializeToString(&header);
          if (i == 2) {  // Field 1000, a string, as a daemon of before sees field 5.
            for (const int byte : {0xC2, 0x3E, 0x03, 0x6E, 0x65, 0x77}) {
              header.push_back(static_cast<char>(byte));
            }
          }
          Call call;
          const auto* const bytes = reinterpret_cast<const std::byte*>(header.data());
          call.header.assign(bytes, bytes + header.size());
          call.timeout_nanos = 60 * kSecond;
          call.done = [&answers](const absl::StatusOr<Response>& r) {
            answers.push_back(r.status());
            v1::DataFetchReply reply;
            ASSERT_TRUE(r.ok() &&
                        reply.ParseFromArray(r->header.data(), static_cast<int>(r->header.size())));
            EXPECT_EQ(reply.groups_size(), 1);
          };
          peer.connection->Start(std::move(call));
        }
      }));
  for (const absl::Status& status : answers) EXPECT_TRUE(status.ok()) << status;
  world.Finish();
}

}  // namespace
}  // namespace kvmill::testing
