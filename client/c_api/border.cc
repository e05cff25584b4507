#include "client/c_api/border.h"

#include <algorithm>

namespace kvmill::c_api {
namespace {

// Plain memory: it must not allocate, and must be there while other thread-locals are destroyed.
constinit thread_local char last_error[1024] = "";

}  // namespace

kvmill_code Fail(kvmill_code code, absl::string_view text) {
  const std::size_t bytes = std::min(text.size(), sizeof(last_error) - 1);
  std::memcpy(last_error, text.data(), bytes);
  last_error[bytes] = '\0';
  return code;
}

absl::Status CheckStructBytes(absl::string_view name, std::size_t got, std::size_t least) {
  if (got >= least && got <= kStructBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": struct_bytes ", got, ", want ", least,
                                                 " to ", kStructBytesMax, "; KVMILL_INIT sets it"));
}

absl::Status CheckUnknownFields(absl::string_view name, const void* in, std::size_t got,
                                std::size_t known) {
  const auto* const bytes = static_cast<const std::byte*>(in);
  for (std::size_t i = known; i < got; ++i) {
    if (bytes[i] != std::byte{0}) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": a field at offset ", i, " that this version of the library does not know"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvmill::c_api

extern "C" {

uint32_t kvmill_abi_version(void) { return KVMILL_ABI_MAJOR << 16 | KVMILL_ABI_MINOR; }

const char* kvmill_last_error(void) { return kvmill::c_api::last_error; }

const char* kvmill_code_name(kvmill_code code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  if (code < 0 || code >= static_cast<kvmill_code>(std::size(kNames))) return "UNKNOWN";
  return kNames[code];
}

}  // extern "C"
