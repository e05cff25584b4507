// A reader below the client library: a session, its Map calls and its requests at the door.
#ifndef KVMILL_TESTS_INTEGRATION_RAW_READER_H_
#define KVMILL_TESTS_INTEGRATION_RAW_READER_H_

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/map_codec.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {

class RawReader {
 public:
  RawReader(const std::string& socket, const ClientNamespace& ns) : pass_(socket) {
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(absl::StrCat("unix:", socket),
                                                   grpc::InsecureChannelCredentials(), arguments);
    cache_ = v1::Cache::NewStub(channel);
    engine_ = v1::Engine::NewStub(channel);
    pass_.AddTo(&session_context_);
    session_ = engine_->Session(&session_context_);
    v1::SessionRequest open;
    open.mutable_open()->mutable_client()->set_protocol_version(kProtocolVersion);
    EXPECT_TRUE(session_->Write(open));
    v1::SessionReply reply;
    EXPECT_TRUE(session_->Read(&reply) && reply.has_opened());
    id_ = reply.opened().session_id();
    request_.mutable_namespace_()->set_name(ns.name);
    request_.set_session_id(id_);
    request_.set_lease_ms(60'000);
  }
  ~RawReader() { CutStream(); }

  v1::MapReply RawMap(const std::vector<BlockKey>& keys, PageMemory memory,
                      bool loads_generations) {
    v1::MapRequest request = request_;
    request.set_memory(ToProto(memory));
    request.set_loads_generations(loads_generations);
    for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
    grpc::ClientContext context;
    pass_.AddTo(&context);
    v1::MapReply reply;
    const grpc::Status status = cache_->Map(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  MapReplyContent Map(const NamespaceSpec& spec, const std::vector<BlockKey>& keys,
                      PageMemory memory = PageMemory::kHost) {
    const auto content = ReadMapReply(RawMap(keys, memory, true), spec, keys.size());
    EXPECT_TRUE(content.ok()) << content.status();
    return content.ok() ? *content : MapReplyContent();
  }
  absl::StatusOr<DoorClient::ArenaMemory> Arena(std::uint64_t lease, const ArenaId& arena) {
    auto request = MakeDoorMessage<DoorArenaRequest>();
    request.lease = lease;
    request.arena = arena.arena;
    request.arena_epoch = arena.epoch;
    request.tier = static_cast<std::uint8_t>(arena.tier);
    std::promise<absl::StatusOr<DoorClient::ArenaMemory>> got;
    pass_.door().RequestArena(1, request,
                              std::chrono::system_clock::now() + std::chrono::seconds(20),
                              [&](auto memory) { got.set_value(std::move(memory)); });
    return got.get_future().get();
  }
  // Only the gRPC stream; the client stays in the door.
  void CutStream() { session_context_.TryCancel(); }
  void LeaveDoor() { pass_.door().Stop(); }

 private:
  LocalPass pass_;
  std::unique_ptr<v1::Cache::Stub> cache_;
  std::unique_ptr<v1::Engine::Stub> engine_;
  grpc::ClientContext session_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> session_;
  std::string id_;
  v1::MapRequest request_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_RAW_READER_H_
