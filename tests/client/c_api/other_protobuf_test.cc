// A program with Protobuf, gRPC and kvmill's own messages in it (libprotobuf.so, and files of the
// same names in its pool) loads libkvmill.so, as an engine's extension module would.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/create_channel.h>
#include <unistd.h>

#include "client/kvmill.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {
namespace {

template <typename T>
void Find(void* library, const char* name, T* function) {
  *function = reinterpret_cast<T>(dlsym(library, name));
  ASSERT_NE(*function, nullptr) << name;
}

// Messages of the program: on the heap, in an arena, by reflection, and over its gRPC.
std::uint64_t UseOwn(const std::string& address) {
  google::protobuf::Arena arena;
  auto* const request = google::protobuf::Arena::CreateMessage<v1::FetchRequest>(&arena);
  for (int i = 0; i < 100; ++i) request->add_keys(std::string(16, 'k'));
  EXPECT_EQ(v1::FetchRequest(*request).keys_size(), 100);
  const auto* const file =
      google::protobuf::DescriptorPool::generated_pool()->FindFileByName("kvmill/v1/cache.proto");
  EXPECT_NE(file, nullptr);
  const auto stub =
      v1::Cache::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::StatReply reply;
  const grpc::Status status = stub->Stat(&context, v1::StatRequest(), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return reply.blocks();
}

TEST(OtherProtobufTest, TheLibraryLoadsBesideIt) {
  const TemporaryDirectory directory;
  const std::string socket = directory / "run/kvmill.sock";
  DaemonProcess daemon(DaemonBinary(), {"--socket", socket, "--host-bytes", "64MiB", "--listen",
                                        "127.0.0.1:0", "--insecure"});
  const nlohmann::json ready = daemon.WaitReady();
  ASSERT_FALSE(ready.is_null()) << daemon.standard_error();
  const std::string own_address = ready["listen"];  // The socket wants a token, which a stub lacks.
  UseOwn(own_address);

  void* const library = dlopen(KVMILL_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(library, nullptr) << dlerror();
  decltype(&kvmill_client_create) create = nullptr;
  decltype(&kvmill_client_destroy) destroy = nullptr;
  decltype(&kvmill_queue_create) create_queue = nullptr;
  decltype(&kvmill_queue_destroy) destroy_queue = nullptr;
  decltype(&kvmill_queue_next) next = nullptr;
  decltype(&kvmill_stat) stat = nullptr;
  decltype(&kvmill_find_namespace) find = nullptr;
  decltype(&kvmill_result_free) free_result = nullptr;
  decltype(&kvmill_result_stat) result_stat = nullptr;
  Find(library, "kvmill_client_create", &create);
  Find(library, "kvmill_client_destroy", &destroy);
  Find(library, "kvmill_queue_create", &create_queue);
  Find(library, "kvmill_queue_destroy", &destroy_queue);
  Find(library, "kvmill_queue_next", &next);
  Find(library, "kvmill_stat", &stat);
  Find(library, "kvmill_find_namespace", &find);
  Find(library, "kvmill_result_free", &free_result);
  Find(library, "kvmill_result_stat", &result_stat);
  ASSERT_FALSE(HasFatalFailure());

  kvmill_client_options options;
  KVMILL_INIT(&options);
  const std::string address = "unix:" + socket;
  options.address = address.c_str();
  kvmill_client* client = nullptr;
  ASSERT_EQ(create(&options, &client), KVMILL_OK);
  kvmill_queue* queue = nullptr;
  ASSERT_EQ(create_queue(&queue), KVMILL_OK);
  for (std::uint64_t round = 0; round < 10; ++round) {
    ASSERT_EQ(stat(client, nullptr, queue, round), KVMILL_OK);
    ASSERT_EQ(find(client, "none", nullptr, queue, round), KVMILL_OK);
    const std::uint64_t blocks = UseOwn(own_address);
    for (int i = 0; i < 2; ++i) {
      kvmill_event event;
      KVMILL_INIT(&event);
      ASSERT_EQ(next(queue, 60000, &event), KVMILL_OK);
      EXPECT_EQ(event.tag, round);
      kvmill_stat_result state;
      KVMILL_INIT(&state);
      if (event.operation == KVMILL_STAT) {
        ASSERT_EQ(result_stat(event.result, &state), KVMILL_OK);
        EXPECT_EQ(state.blocks, blocks);
        EXPECT_GT(state.uptime_s, 0);
      } else {
        EXPECT_EQ(event.code, KVMILL_NOT_FOUND);
      }
      free_result(event.result);
    }
  }
  EXPECT_EQ(destroy(client), KVMILL_OK);
  EXPECT_EQ(destroy_queue(queue), KVMILL_OK);
  dlclose(library);  // Stays: its threads may still run.
  UseOwn(own_address);
}

}  // namespace
}  // namespace kvmill::testing
