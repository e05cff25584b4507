#include <gmock/gmock.h>
// Requests that nobody should send, to every method of a real daemon: random ones, mutations of
// valid ones, damaged bytes, messages out of order, calls cut in the middle. The daemon lives and
// answers each with a documented code; what it stores stays as it is, and nothing is left in it.
// Prints its seed, --seed=N repeats it.
#include <google/protobuf/stubs/logging.h>
#include <signal.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvmill/v1/admin.grpc.pb.h"
#include "kvmill/v1/events.pb.h"
#include "kvmill/v1/peer.pb.h"
#include "kvmill/v1/ticket.pb.h"
#include "service/status_grpc.h"
#include "tests/cluster/etcd_process.h"
#include "tests/integration/hostile_caller.h"
#include "tests/integration/ucx_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

constexpr std::size_t kReplyBytesMax = std::size_t{4} << 20;
constexpr std::size_t kErrorBytesMax = 2048;  // gRPC drops trailers of more than 8 KiB.
// Those that end what is asked; others have tests of their own.
constexpr char kDrain[] = "kvmill.v1.Admin.Drain", kDrainNode[] = "kvmill.v1.Admin.DrainNode";

// Every method of every service in proto/kvmill/v1.
std::vector<const MethodDescriptor*> AllMethods() {
  // One message of each file: the linker then takes them all.
  for (const Descriptor* one :
       {v1::StatusReply::descriptor(), v1::StatReply::descriptor(), v1::ConnectReply::descriptor(),
        v1::HelloReply::descriptor(), v1::NamespaceRef::descriptor(), v1::LocateReply::descriptor(),
        v1::TicketUpdate::descriptor(), v1::WatchReply::descriptor()}) {
    EXPECT_NE(one, nullptr);
  }
  std::vector<const MethodDescriptor*> methods;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(KVMILL_SOURCE_DIR) + "/proto/kvmill/v1")) {
    if (entry.path().extension() != ".proto") continue;
    const auto* file = DescriptorPool::generated_pool()->FindFileByName(
        "kvmill/v1/" + entry.path().filename().string());
    EXPECT_NE(file, nullptr) << entry.path() << ": name a message of it above";
    for (int s = 0; file != nullptr && s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.push_back(file->service(s)->method(m));
      }
    }
  }
  return methods;
}

// What docs/architecture.md says that may come back.
bool IsDocumented(int code) {
  static const std::set<int> codes = {
      grpc::StatusCode::OK,
      grpc::StatusCode::INVALID_ARGUMENT,
      grpc::StatusCode::NOT_FOUND,
      grpc::StatusCode::FAILED_PRECONDITION,
      grpc::StatusCode::PERMISSION_DENIED,
      grpc::StatusCode::UNAUTHENTICATED,
      grpc::StatusCode::RESOURCE_EXHAUSTED,
      grpc::StatusCode::ABORTED,
      grpc::StatusCode::DATA_LOSS,
  };
  return codes.count(code) != 0;
}

bool IsOfGrpc(int code) {
  return code == grpc::StatusCode::INTERNAL || code == grpc::StatusCode::UNIMPLEMENTED;
}

// The outcomes of blocks in a reply, wherever they are.
void ForEachStatus(const Message& message, const std::function<void(const v1::BlockStatus&)>& see) {
  if (message.GetDescriptor() == v1::BlockStatus::descriptor()) {
    return see(static_cast<const v1::BlockStatus&>(message));
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  const auto& r = *message.GetReflection();
  r.ListFields(message, &fields);
  for (const auto* field : fields) {
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      ForEachStatus(r.GetMessage(message, field), see);
      continue;
    }
    for (int i = 0; i < r.FieldSize(message, field); ++i) {
      ForEachStatus(r.GetRepeatedMessage(message, field, i), see);
    }
  }
}

class HostileRequestsTest : public UcxDaemonTest, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr const char* kGauges[] = {"sessions",
                                            "leases",
                                            "event_readers",
                                            "leased_bytes",
                                            "registrations",
                                            "tickets{side=\"producer\"}",
                                            "tickets{side=\"consumer\"}",
                                            "ticket_bytes{side=\"producer\"}",
                                            "ticket_bytes{side=\"consumer\"}",
                                            "referenced_blocks",
                                            "assembling_blocks",
                                            "data_calls",
                                            "staging_bytes",
                                            "data_connections",
                                            "unwritten_blocks",
                                            "tier_blocks{tier=\"host\"}",
                                            "tier_blocks{tier=\"disk\"}",
                                            "tier_used_bytes{tier=\"host\"}"};

  std::map<std::string, double> Gauges() const {
    std::map<std::string, double> gauges;
    for (const char* gauge : kGauges) gauges[gauge] = Metric(gauge);
    return gauges;
  }

  // One call, and what must be true of every answer.
  void CallOnce(Caller& caller, const MethodDescriptor& method, bool is_local) {
    MessageMutator& mutator = caller.mutator();
    CallOnce(caller, method, is_local, mutator.Below(100));
  }
  // Below 25: as it should be.
  void CallOnce(Caller& caller, const MethodDescriptor& method, bool is_local, std::uint64_t kind) {
    MessageMutator& mutator = caller.mutator();
    Messages messages = caller.Valid(method);
    if (kind >= 85) {
      for (MessagePtr& message : messages) {
        message->Clear();
        mutator.Fill(message.get());
      }
    } else if (kind >= 25) {
      for (MessagePtr& message : messages) {
        if (messages.size() == 1 || mutator.OneIn(2)) {
          mutator.Mutate(message.get(), 1 + static_cast<int>(mutator.Below(4)));
        }
      }
    }
    std::vector<std::string> sent;
    for (const MessagePtr& message : messages) sent.push_back(message->SerializeAsString());
    if (kind >= 25 && mutator.OneIn(5)) {
      std::string& one = sent[mutator.Below(sent.size())];
      one = mutator.Damage(one);
    }
    if (method.client_streaming() && kind >= 25 && mutator.OneIn(4)) {  // Out of order.
      std::swap(sent[mutator.Below(sent.size())], sent[mutator.Below(sent.size())]);
      if (mutator.OneIn(3)) sent.push_back(sent[mutator.Below(sent.size())]);
      if (mutator.OneIn(3)) sent.erase(sent.begin());
    }
    for (const std::string& message : sent) {
      if (!caller.IsAllowed(method, message)) return;
    }
    const bool cut = kind >= 25 && mutator.OneIn(12);
    const RawAnswer answer =
        caller.Call(method, sent, cut ? static_cast<int>(mutator.Below(8)) : -1);
    Check(method, sent, answer, cut, is_local);
    const bool answered = IsEndless(method) ? !answer.replies.empty() : answer.status.ok();
    if (answered && !cut) answered_.insert(method.full_name());
  }

  void Check(const MethodDescriptor& method, const std::vector<std::string>& sent,
             const RawAnswer& answer, bool cut, bool is_local) {
    const int code = answer.status.error_code();
    const std::string& text = answer.status.error_message();
    std::string described =
        absl::StrCat(method.full_name(), ": code ", code, ", ", text.substr(0, 300));
    for (const std::string& message : sent) {
      MessagePtr request = New(method.input_type());
      absl::StrAppend(&described, "\n  ",
                      request->ParseFromString(message)
                          ? request->ShortDebugString().substr(0, 2000)
                          : absl::StrCat("no message, ", message.size(), " bytes"));
    }
    SCOPED_TRACE(described);
    if (IsAdmin(method) ? !is_local : IsPeer(method) && is_local) {
      EXPECT_TRUE(code == grpc::StatusCode::PERMISSION_DENIED ||
                  (cut && code == grpc::StatusCode::CANCELLED) || !Parses(method, sent));
    } else if ((IsPeer(method) || method.name() == "Redeem") &&
               code == grpc::StatusCode::UNAVAILABLE) {
      EXPECT_NE(text.find("is no member"), text.npos);
    } else if (IsEndless(method) && code == grpc::StatusCode::DEADLINE_EXCEEDED) {
      EXPECT_TRUE(Parses(method, sent));
    } else if (!IsDocumented(code)) {
      // What gRPC itself says to bytes that are no message.
      EXPECT_TRUE((cut && code == grpc::StatusCode::CANCELLED) ||
                  (IsOfGrpc(code) && !Parses(method, sent)));
    }
    if (code == grpc::StatusCode::UNAUTHENTICATED) ADD_FAILURE() << "the token was a good one";
    EXPECT_TRUE(code != grpc::StatusCode::INVALID_ARGUMENT || !text.empty());
    EXPECT_LE(text.size(), kErrorBytesMax);
    EXPECT_EQ(text.find("metadata"), text.npos);  // gRPC, when our message did not fit.
    for (const std::string& bytes : answer.replies) {
      EXPECT_LE(bytes.size(), kReplyBytesMax);
      MessagePtr reply = New(method.output_type());
      if (!reply->ParseFromString(bytes)) {
        ADD_FAILURE() << "a reply of " << bytes.size() << " bytes does not parse";
        continue;
      }
      ForEachStatus(*reply, [&](const v1::BlockStatus& status) {
        const bool cancelled = status.code() == grpc::StatusCode::CANCELLED;  // A store of pages.
        EXPECT_TRUE(IsDocumented(status.code()) || cancelled) << status.ShortDebugString();
        EXPECT_EQ(status.message().empty(), status.code() == 0) << status.ShortDebugString();
        EXPECT_LE(status.message().size(), kErrorBytesMax);
      });
    }
  }
  static bool Parses(const MethodDescriptor& method, const std::vector<std::string>& sent) {
    for (const std::string& message : sent) {
      if (!New(method.input_type())->ParseFromString(message)) return false;
    }
    return true;
  }

  std::set<std::string> answered_;
};

INSTANTIATE_TEST_SUITE_P(All, HostileRequestsTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "WithADisk" : "InMemory");
});

TEST_P(HostileRequestsTest, EndAsDocumentedAndLeaveNothing) {
  const std::uint64_t seed = SeedArgument();
  EtcdProcess etcd;  // Peers answer in a cluster only.
  ASSERT_TRUE(etcd.Start());
  std::vector<std::string> arguments = {
      "--session-grace", "1s",        "--host-bytes",
      "64MiB",           "--cluster", absl::StrCat("etcd://", etcd.address().ToString()),
      "--node-id",       "hostile"};
  if (GetParam()) {
    for (const std::string& argument : {std::string("--data-dir"), directory_ / "data",
                                        std::string("--disk-bytes"), std::string("1GiB")}) {
      arguments.push_back(argument);
    }
  }
  StartUcx(arguments);
  World world;
  world.node_id = "hostile";
  world.boot_id = absl::HexStringToBytes(ready_["boot_id"].get<std::string>());
  EXPECT_TRUE(Eventually([&] { return Metric("members{state=\"serving\"}") == 1; }));
  world.kept = Open("kept", TwoGroups("kept"));
  world.prey = Open("prey", TwoGroups("prey"));
  const auto gauges = Gauges();
  Sequence sequence(world.kept.spec, 4 * 64, 1);
  ASSERT_EQ(Put(world.kept, "s", sequence).blocks_stored, 4u);
  world.keys = KeysOf("s", 4);
  PageCollector before;
  ASSERT_TRUE(client_->Fetch(world.kept, world.keys, before).ok());
  ASSERT_EQ(before.pages.size(), 12u);

  std::vector<const MethodDescriptor*> methods;
  for (const MethodDescriptor* method : AllMethods()) {
    if (method->full_name() != kDrain && method->full_name() != kDrainNode) {
      methods.push_back(method);
    }
  }
  // What goes wrong at the other end is said there, too.
  google::protobuf::SetLogHandler(nullptr);
  const int lives = ShortOrLong(6, 200);
  for (int life = 0; life < lives && !HasFailure(); ++life) {
    Put(world.prey, "s", sequence);
    const bool is_local = life % 3 != 2;
    Caller caller(world, is_local ? "unix:" + socket() : ready_["listen"].get<std::string>(),
                  is_local ? socket() : "", seed * 1000 + static_cast<std::uint64_t>(life));
    for (int i = 0; i < 300 && !HasFailure(); ++i) {
      const MethodDescriptor& method = *methods[caller.mutator().Below(methods.size())];
      // Those who may administer the daemon may empty it.
      if (IsAdmin(method) && is_local && method.name() == "Evict") continue;
      CallOnce(caller, method, is_local);
    }
    // Too few of them are asked from afar to count on it.
    for (const MethodDescriptor* method : methods) {
      if (!is_local && IsPeer(*method)) CallOnce(caller, *method, is_local, 0);
    }
    EXPECT_TRUE(client_->Stat().ok());
  }
  for (const MethodDescriptor* method : methods) {
    if (HasFailure() || method->full_name() == "kvmill.v1.Admin.Evict") continue;
    if (method->name() == "Flush" && !GetParam()) continue;  // There is nowhere to flush to.
    if (method->name() == "Redeem") continue;  // There is no other node that made a ticket.
    EXPECT_EQ(answered_.count(method->full_name()), 1u)
        << method->full_name() << " was never answered with OK: teach Caller::Valid";
  }

  PageCollector after;
  ASSERT_TRUE(client_->Fetch(world.kept, world.keys, after).ok());
  EXPECT_TRUE(before.pages == after.pages);
  const auto verified = client_->Verify();
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->failures, 0u);
  // Also of those that callers registered.
  const auto namespaces = client_->Namespaces();
  ASSERT_TRUE(namespaces.ok()) << namespaces.status();
  for (const ClientNamespace& ns : *namespaces) {
    EXPECT_TRUE(client_->Clear(ns).ok()) << ns.name;
  }
  EXPECT_TRUE(Eventually([&] { return Gauges() == gauges; }));
  for (const auto& [gauge, value] : Gauges()) EXPECT_EQ(value, gauges.at(gauge)) << gauge;
  EXPECT_EQ(client_->Stat()->checksum_failures, 0u);
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
}

// gRPC drops a status whose message is too long, code and all.
TEST_P(HostileRequestsTest, AnErrorThatQuotesALongNameKeepsItsCode) {
  if (GetParam()) GTEST_SKIP() << "the same with a disk";
  Start();
  LocalPass pass(socket());
  RawCallOptions options;
  options.token_hex = pass.token_hex();
  for (const char* character : {"x", "\u00e9", "\n"}) {
    v1::DescribeRequest request;
    std::string& name = *request.mutable_namespace_()->mutable_name();
    for (int i = 0; i < 50'000; ++i) name += character;
    const RawAnswer answer = CallRaw(RawChannel("unix:" + socket()), "/kvmill.v1.Engine/Describe",
                                     {request.SerializeAsString()}, options);
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_LE(answer.status.error_message().size(), 1024u);
    EXPECT_THAT(answer.status.error_message(),
                ::testing::HasSubstr(absl::StrCat("(", name.size(), " bytes)")));
    // Whatever it is that is long, and not within a character.
    const grpc::Status cut = StatusToGrpc(absl::NotFoundError(name));
    EXPECT_EQ(cut.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_LE(cut.error_message().size(), 1024u);
    EXPECT_GT(cut.error_message().size(), 1000u);
    const std::string kept = cut.error_message().substr(0, cut.error_message().size() - 3);
    EXPECT_EQ(cut.error_message().substr(kept.size()), "...");
    EXPECT_EQ(kept, name.substr(0, kept.size()));
    EXPECT_EQ(kept.size() % std::string(character).size(), 0u);
  }
}

}  // namespace
}  // namespace kvmill::testing
