// A client that knows its way around a daemon, and so can make requests that come far. Its valid
// requests are what hostile_requests_test mutates.
#ifndef KVMILL_TESTS_INTEGRATION_HOSTILE_CALLER_H_
#define KVMILL_TESTS_INTEGRATION_HOSTILE_CALLER_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
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
#include "client/door_protocol.h"
#include "client/shared_memory.h"
#include "kernels/tile_format.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "kvmill/v1/ticket.grpc.pb.h"
#include "service/cluster/anchor.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/message_mutator.h"
#include "tests/integration/raw_call.h"

namespace kvmill::testing {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using MessagePtr = std::unique_ptr<Message>;
using Messages = std::vector<MessagePtr>;

inline bool IsAdmin(const MethodDescriptor& method) { return method.service()->name() == "Admin"; }

inline bool IsPeer(const MethodDescriptor& method) { return method.service()->name() == "Peer"; }

// What ends when its caller gives it up.
inline bool IsEndless(const MethodDescriptor& method) {
  return method.full_name() == "kvmill.v1.Events.Watch";
}

inline std::string PathOf(const MethodDescriptor& method) {
  return absl::StrCat("/", method.service()->full_name(), "/", method.name());
}

inline MessagePtr New(const Descriptor* type) {
  return MessagePtr(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

template <typename T>
MessagePtr Copy(const T& message) {
  return std::make_unique<T>(message);
}

// What the callers know of the daemon.
struct World {
  ClientNamespace kept;  // Whose blocks must stay as they are.
  ClientNamespace prey;
  std::vector<BlockKey> keys;  // Of both.
  std::string node_id;         // The daemon's in its cluster,
  std::string boot_id;         //   and which of its lives it is: 16 bytes.
};

// A client for a while: with a session, leases and registered memory, if it is a local one.
class Caller {
 public:
  Caller(const World& world, const std::string& address, const std::string& socket,
         std::uint64_t seed)
      : world_(world), mutator_(seed), channel_(RawChannel(address)) {
    if (!socket.empty()) pass_ = std::make_unique<LocalPass>(socket);
    OpenSession();
    for (const ClientNamespace* ns : {&world.kept, &world.prey}) {
      mutator_.Know("name", ns->name);
      mutator_.Know("fingerprint", std::string(AsBytes(ns->fingerprint)));
    }
    for (const char* field : {"key", "keys", "parent"}) {
      for (const BlockKey& key : world.keys) mutator_.Know(field, std::string(key.view()));
    }
    mutator_.Know("session_id", session_id_);
    mutator_.Know("resume_session_id", session_id_);
    mutator_.Know("protocol_version", std::uint64_t{kProtocolVersion});
    mutator_.Know("lease_ms", 1000);
    mutator_.Know("node_id", std::string(16, 'n'));
    mutator_.Know("sources", "127.0.0.1");
    for (const char* field : {"asker", "holder"}) mutator_.Know(field, world.node_id);
    for (const char* field : {"incarnation", "holder_incarnation"}) {
      mutator_.Know(field, world.boot_id);
    }
    for (const char* field : {"token_count", "block_tokens", "head_dim"}) {
      mutator_.Know(field, 64);
    }
    for (const char* field : {"group", "layer_begin", "head_begin", "sequence", "region"}) {
      mutator_.Know(field, 0);
      mutator_.Know(field, 1);
    }
    for (const char* field : {"layer_count", "head_count", "kv_heads", "count"}) {
      mutator_.Know(field, 1);
      mutator_.Know(field, 2);
    }
    if (!is_local()) return;
    Lease();
    Share();
  }
  ~Caller() { session_context_.TryCancel(); }

  bool is_local() const { return pass_ != nullptr; }
  MessageMutator& mutator() { return mutator_; }
  RawAnswer Call(const MethodDescriptor& method, const std::vector<std::string>& messages,
                 int cut_after) {
    RawCallOptions options;
    options.cut_after = cut_after;
    if (is_local()) options.token_hex = pass_->token_hex();
    if (IsEndless(method)) options.timeout = std::chrono::milliseconds(100);
    return CallRaw(channel_, PathOf(method), messages, options);
  }

  // A request, or the requests of a stream, that the daemon answers with OK (most of the time).
  Messages Valid(const MethodDescriptor& method) {
    const std::string& name = method.name();
    Messages messages;
    if (name == "Hello") {
      v1::HelloRequest request;
      request.mutable_client()->set_protocol_version(kProtocolVersion);
      messages.push_back(Copy(request));
    } else if (name == "Register") {
      v1::RegisterRequest request;
      request.mutable_client()->set_protocol_version(kProtocolVersion);
      request.set_name(world_.prey.name);
      ToProto(world_.prey.spec, request.mutable_spec());
      messages.push_back(Copy(request));
    } else if (name == "Session") {
      v1::SessionRequest request;
      request.mutable_open()->mutable_client()->set_protocol_version(kProtocolVersion);
      messages.push_back(Copy(request));
      request.mutable_heartbeat()->set_sequence(7);
      messages.push_back(Copy(request));
      request.mutable_cancel()->set_number(1);
      request.mutable_cancel()->add_stores(1);
      messages.push_back(Copy(request));
      request.mutable_close();
      messages.push_back(Copy(request));
    } else if (name == "RegisterMemory") {
      messages.push_back(Copy(Memory()));
    } else if (name == "UnregisterMemory") {
      v1::RegisterMemoryReply known;
      const auto* memory =
          DescriptorPool::generated_pool()->FindMethodByName("kvmill.v1.Engine.RegisterMemory");
      const RawAnswer answer = Call(*memory, {Memory().SerializeAsString()}, -1);
      v1::UnregisterMemoryRequest request;
      request.set_session_id(session_id_);
      if (!answer.replies.empty() && known.ParseFromString(answer.replies[0])) {
        request.set_registration(known.registration());
      }
      messages.push_back(Copy(request));
    } else if (name == "Store") {
      messages = ValidStore();
    } else if (name == "Map") {
      messages.push_back(Copy(MapKept()));
    } else if (name == "Renew") {
      v1::RenewRequest request;
      request.set_session_id(session_id_);
      request.set_lease_ms(5000);
      v1::LeaseRange* range = request.add_leases();
      range->set_first(first_lease_);
      range->set_count(2);
      messages.push_back(Copy(request));
    } else if (name == "Release") {
      v1::ReleaseRequest request;
      request.set_session_id(session_id_);
      request.add_leases()->set_first(first_lease_);
      request.mutable_leases(0)->set_count(1);
      messages.push_back(Copy(request));
    } else if (name == "Connect") {
      v1::ConnectRequest request;
      request.set_node_id(std::string(16, 'n'));
      messages.push_back(Copy(request));
    } else if (IsPeer(method)) {
      messages.push_back(ValidOfPeer(method));
    } else if (method.service()->name() == "Ticket") {
      messages.push_back(ValidOfTicket(method));
    } else {
      // The others want a namespace and keys, or nothing.
      MessagePtr request = New(method.input_type());
      const auto& r = *request->GetReflection();
      if (const auto* field = method.input_type()->FindFieldByName("namespace")) {
        auto* ref = static_cast<v1::NamespaceRef*>(r.MutableMessage(request.get(), field));
        ref->set_name(Destroys(method) || mutator_.OneIn(2) ? world_.prey.name : world_.kept.name);
      }
      if (const auto* field = method.input_type()->FindFieldByName("keys")) {
        for (const BlockKey& key : world_.keys) {
          r.AddString(request.get(), field, std::string(key.view()));
        }
      }
      if (const auto* field = method.input_type()->FindFieldByName("key")) {
        r.SetString(request.get(), field, std::string(world_.keys[0].view()));
      }
      messages.push_back(std::move(request));
    }
    return messages;
  }

  static bool Destroys(const MethodDescriptor& method) {
    return method.name() == "Remove" || method.name() == "Clear";
  }
  // Whether this may be asked for: what is kept is not to be removed by those who are allowed to.
  bool IsAllowed(const MethodDescriptor& method, const std::string& bytes) const {
    if (!Destroys(method)) return true;
    MessagePtr request = New(method.input_type());
    if (!request->ParseFromString(bytes)) return true;
    const auto* field = method.input_type()->FindFieldByName("namespace");
    const auto& ref =
        static_cast<const v1::NamespaceRef&>(request->GetReflection()->GetMessage(*request, field));
    return ref.name() != world_.kept.name && ref.fingerprint() != AsBytes(world_.kept.fingerprint);
  }

 private:
  void OpenSession() {
    const auto engine = v1::Engine::NewStub(channel_);
    if (is_local()) pass_->AddTo(&session_context_);
    session_ = engine->Session(&session_context_);
    v1::SessionRequest open;
    open.mutable_open()->mutable_client()->set_protocol_version(kProtocolVersion);
    v1::SessionReply reply;
    EXPECT_TRUE(session_->Write(open) && session_->Read(&reply) && reply.has_opened());
    session_id_ = reply.opened().session_id();
  }

  // As the daemon itself would ask: there is no other node.
  MessagePtr ValidOfPeer(const MethodDescriptor& method) {
    const BlockKey& anchor = world_.keys[0];
    const std::uint64_t hash = AnchorHash(world_.kept.fingerprint, anchor);
    if (method.name() == "Locate") {
      v1::LocateRequest request;
      request.set_incarnation(world_.boot_id);
      request.set_fingerprint(std::string(AsBytes(world_.kept.fingerprint)));
      request.set_asker(world_.node_id);
      v1::LocateRun* const run = request.add_runs();
      run->set_anchor(std::string(anchor.view()));
      for (const BlockKey& key : world_.keys) run->add_keys(std::string(key.view()));
      return Copy(request);
    }
    if (method.name() == "DescribeNamespace") {
      v1::DescribeNamespaceRequest request;
      request.set_incarnation(world_.boot_id);
      request.mutable_namespace_()->set_name(world_.kept.name);
      return Copy(request);
    }
    if (method.name() == "ListRuns") {
      v1::ListRunsRequest request;
      request.set_incarnation(world_.boot_id);
      request.add_anchor_hashes(hash);
      request.add_after_places(1);
      request.add_after_hashes(hash);
      return Copy(request);
    }
    if (method.name() == "AskTicket" || method.name() == "AcknowledgeTicket") {
      v1::AskTicketRequest request;  // The other one is the beginning of it.
      request.set_incarnation(world_.boot_id);
      *request.mutable_holder() = Holder(Ticket());
      MessagePtr same = New(method.input_type());
      same->ParseFromString(request.SerializeAsString());
      return same;
    }
    if (method.name() == "ReadTicket") {
      v1::AskTicketRequest ask;
      ask.set_incarnation(world_.boot_id);
      *ask.mutable_holder() = Holder(Ticket());
      Call(*DescriptorPool::generated_pool()->FindMethodByName("kvmill.v1.Peer.AskTicket"),
           {ask.SerializeAsString()}, -1);
      v1::ReadTicketRequest request;
      request.set_incarnation(world_.boot_id);
      *request.mutable_holder() = ask.holder();
      request.add_pieces()->add_layers(0);
      return Copy(request);
    }
    if (method.name() == "Compare") {
      v1::CompareRequest request;
      request.set_incarnation(world_.boot_id);
      request.set_holder(world_.node_id);
      request.set_holder_incarnation(world_.boot_id);
      for (int i = 0; i < 64; ++i) request.add_digests(0);
      return Copy(request);
    }
    v1::AnnounceRequest request;  // Announce and HandOver.
    request.set_incarnation(world_.boot_id);
    request.set_holder(world_.node_id);
    request.set_holder_incarnation(world_.boot_id);
    request.add_anchor_hashes(hash);
    request.add_counts(static_cast<std::uint32_t>(world_.keys.size()));
    request.set_tags(std::string(2 * world_.keys.size(), 'x'));
    request.add_sums(hash);
    request.add_blocks(static_cast<std::uint32_t>(world_.keys.size()));
    return Copy(request);
  }

  v1::CreateTicketRequest PromiseKept() const {
    v1::CreateTicketRequest request;
    request.set_session_id(session_id_);
    request.mutable_namespace_()->set_name(world_.kept.name);
    v1::PromisedBlock* const block = request.add_blocks();
    block->set_key(std::string(world_.keys[0].view()));
    block->set_token_count(world_.kept.spec.block_tokens);
    return request;
  }
  // One that was just made, of a block that is there.
  std::string Ticket() {
    const auto* create =
        DescriptorPool::generated_pool()->FindMethodByName("kvmill.v1.Ticket.Create");
    const RawAnswer answer = Call(*create, {PromiseKept().SerializeAsString()}, -1);
    v1::CreateTicketReply reply;
    EXPECT_TRUE(answer.replies.empty() || reply.ParseFromString(answer.replies[0]));
    return reply.ticket();
  }
  // As another node.
  static v1::TicketHolder Holder(const std::string& ticket) {
    v1::TicketBearer bearer;
    EXPECT_TRUE(bearer.ParseFromString(ticket));
    v1::TicketHolder holder;
    holder.set_secret(bearer.secret());
    holder.set_consumer("another");
    holder.set_consumer_incarnation(std::string(16, 'a'));
    holder.set_fingerprint(bearer.fingerprint());
    return holder;
  }
  MessagePtr ValidOfTicket(const MethodDescriptor& method) {
    if (method.name() == "Create") return Copy(PromiseKept());
    v1::RedeemTicketRequest request;  // Revoke has the ticket alone.
    request.set_ticket(Ticket());
    if (method.name() == "Redeem") request.mutable_namespace_()->set_name(world_.kept.name);
    MessagePtr same = New(method.input_type());
    same->ParseFromString(request.SerializeAsString());
    return same;
  }

  v1::MapRequest MapKept() const {
    v1::MapRequest request;
    request.mutable_namespace_()->set_name(world_.kept.name);
    for (const BlockKey& key : world_.keys) request.add_keys(std::string(key.view()));
    request.set_session_id(session_id_);
    request.set_lease_ms(5000);
    request.set_loads_generations(true);
    return request;
  }

  void Lease() {
    const auto* map = DescriptorPool::generated_pool()->FindMethodByName("kvmill.v1.Cache.Map");
    const RawAnswer answer = Call(*map, {MapKept().SerializeAsString()}, -1);
    v1::MapReply reply;
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
    ASSERT_TRUE(answer.replies.size() == 1 && reply.ParseFromString(answer.replies[0]));
    first_lease_ = reply.first_lease();
    mutator_.Know("first", first_lease_);
    mutator_.Know("leases", first_lease_);
  }

  v1::RegisterMemoryRequest Memory() const {
    const LayerGroup& group = world_.prey.spec.groups[0];
    v1::RegisterMemoryRequest request;
    request.set_session_id(session_id_);
    request.mutable_namespace_()->set_name(world_.prey.name);
    v1::EngineGeometry& geometry = *request.mutable_geometry();
    geometry.add_regions()->set_base(1 << 20);
    geometry.mutable_regions(0)->set_bytes(kRegionBytes);
    geometry.mutable_regions(0)->set_kind(is_local() ? v1::ENGINE_REGION_MEMFD
                                                     : v1::ENGINE_REGION_PRIVATE);
    v1::EngineLayers& l = *geometry.add_layers();
    const std::uint64_t row = std::uint64_t{2} * group.head_dim;
    l.set_element(v1::ENGINE_ELEMENT_BFLOAT16);
    if (world_.prey.spec.source_dtype == DType::kFloat16) {
      l.set_element(v1::ENGINE_ELEMENT_FLOAT16);
    }
    l.set_block_tokens(64);
    l.set_head_dim(group.head_dim);
    l.set_head_count(group.kv_heads);
    l.set_page_tokens(16);
    l.set_page_count(kPageCount);
    l.set_head_stride_bytes(row);
    l.set_token_stride_bytes(row * group.kv_heads);
    l.set_page_bytes(16 * row * group.kv_heads);
    l.set_page_stride_bytes(16 * row * group.kv_heads);
    for (std::uint64_t layer = 0; layer < group.layers.size(); ++layer) {
      l.add_keys()->set_offset_bytes(2 * layer * kPageCount * l.page_bytes());
      l.add_values()->set_offset_bytes((2 * layer + 1) * kPageCount * l.page_bytes());
    }
    return request;
  }

  // Memory for stores of pages.
  void Share() {
    const auto* method =
        DescriptorPool::generated_pool()->FindMethodByName("kvmill.v1.Engine.RegisterMemory");
    const RawAnswer answer = Call(*method, {Memory().SerializeAsString()}, -1);
    v1::RegisterMemoryReply reply;
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
    ASSERT_TRUE(answer.replies.size() == 1 && reply.ParseFromString(answer.replies[0]));
    registration_ = reply.registration();
    mutator_.Know("registration", registration_);
    memory_ = *SharedMemory::Create(kRegionBytes);
    auto region = MakeDoorMessage<DoorRegion>();
    region.registration = registration_;
    region.kind = static_cast<std::uint8_t>(DoorRegionKind::kMemfd);
    region.bytes = kRegionBytes;
    std::promise<absl::Status> taken;
    pass_->door().SendRegion(1, region, memory_.fd(),
                             std::chrono::system_clock::now() + std::chrono::seconds(20),
                             [&](const absl::Status& status) { taken.set_value(status); });
    const absl::Status status = taken.get_future().get();
    ASSERT_TRUE(status.ok()) << status;
  }

  Messages ValidStore() {
    Messages messages;
    const bool of_pages = is_local() && mutator_.OneIn(3);
    const ClientNamespace& ns = of_pages || mutator_.OneIn(2) ? world_.prey : world_.kept;
    v1::StoreRequest begin;
    begin.mutable_begin()->mutable_namespace_()->set_name(ns.name);
    if (of_pages) {
      v1::PageSource& source = *begin.mutable_begin()->mutable_pages();
      source.set_session_id(session_id_);
      source.set_registration(registration_);
      source.set_store(++stores_);
      mutator_.Know("stores", stores_);
    }
    messages.push_back(Copy(begin));
    for (std::uint32_t b = 0; b < 2; ++b) {
      const std::size_t groups = of_pages ? 1 : ns.spec.groups.size();
      for (std::uint32_t g = 0; g < groups; ++g) {
        const LayerGroup& group = ns.spec.groups[g];
        v1::StoreRequest request;
        v1::StoreChunk& chunk = *request.mutable_chunk();
        chunk.set_sequence(b);
        chunk.set_key(mutator_.OneIn(2) ? std::string(world_.keys[b].view())
                                        : absl::StrCat("new key ", mutator_.Below(40)));
        chunk.set_token_count(mutator_.OneIn(3) ? 20 : 64);
        chunk.set_block_index(b);
        chunk.set_group(g);
        chunk.set_layer_count(static_cast<std::uint32_t>(group.layers.size()));
        chunk.set_head_count(group.kv_heads);
        chunk.set_last(true);
        if (of_pages) {
          for (std::uint32_t page = 0; page * 16 < chunk.token_count(); ++page) {
            chunk.mutable_pages()->add_numbers(mutator_.Below(kPageCount));
          }
        } else {
          const std::size_t bytes = RawBytes(FormatOf(ns.spec, group), chunk.token_count()) *
                                    chunk.layer_count() * chunk.head_count();
          chunk.set_inline_(std::string(bytes, '\0'));
        }
        messages.push_back(Copy(request));
      }
    }
    return messages;
  }

  static constexpr std::uint64_t kPageCount = 16;
  static constexpr std::uint64_t kRegionBytes = 1 << 20;

  const World& world_;
  MessageMutator mutator_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<LocalPass> pass_;
  grpc::ClientContext session_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> session_;
  std::string session_id_;
  std::uint64_t first_lease_ = 0;
  std::uint64_t registration_ = 0;
  std::uint64_t stores_ = 0;
  SharedMemory memory_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_HOSTILE_CALLER_H_
