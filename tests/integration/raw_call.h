// One gRPC call below everything that knows its messages: bytes there, bytes back.
#ifndef KVMILL_TESTS_INTEGRATION_RAW_CALL_H_
#define KVMILL_TESTS_INTEGRATION_RAW_CALL_H_

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace kvmill::testing {

struct RawAnswer {
  grpc::Status status;
  std::vector<std::string> replies;
};

struct RawCallOptions {
  std::string token_hex;  // Of the local door; empty: without.
  int cut_after = -1;     // So many events: then the caller gives up. Negative: never.
  std::chrono::milliseconds timeout{20'000};
};

inline std::shared_ptr<grpc::Channel> RawChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

inline std::string TextOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

inline grpc::ByteBuffer BufferOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Sends the messages one after the other, half-closes, and reads what comes meanwhile and after.
RawAnswer CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::vector<std::string>& messages, const RawCallOptions& options);

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_RAW_CALL_H_
