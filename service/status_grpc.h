// The one place where our status codes become gRPC's.
#ifndef KVMILL_SERVICE_STATUS_GRPC_H_
#define KVMILL_SERVICE_STATUS_GRPC_H_

#include <grpcpp/support/status.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmill {

// The message travels as a header, of which gRPC takes 8 KiB, escaped: a longer one, which quotes
// what the caller sent, would take its code with it.
inline constexpr std::size_t kErrorBytesMax = 1024;

// Codes have the same numbers on both sides; the message travels as it is, if it is not too long.
inline grpc::Status StatusToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kErrorBytesMax) {
    constexpr absl::string_view kCut = "...";
    std::size_t end = kErrorBytesMax - kCut.size();
    while (end > 0 && (message[end] & 0xC0) == 0x80) --end;  // Not within a character.
    message.resize(end);
    message.append(kCut.data(), kCut.size());
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STATUS_GRPC_H_
