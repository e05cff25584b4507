// What stands between the C ABI and the C++ behind it: error texts, structs of other versions, and
// the place where exceptions end. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_BORDER_H_
#define KVMILL_CLIENT_C_API_BORDER_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/kvmill.h"

namespace kvmill::c_api {

// Keeps `text` as the calling thread's kvmill_last_error(), cut where it is too long. Does not
// allocate.
kvmill_code Fail(kvmill_code code, absl::string_view text);

// Runs `body`, which returns a Status: what a function of the ABI returns.
template <typename Body>
kvmill_code Guard(Body body) noexcept {
  try {
    const absl::Status status = body();
    if (status.ok()) return KVMILL_OK;
    return Fail(static_cast<kvmill_code>(status.code()), status.message());
  } catch (const std::bad_alloc&) {
    return Fail(KVMILL_RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& e) {
    return Fail(KVMILL_INTERNAL, e.what());
  } catch (...) {
    return Fail(KVMILL_INTERNAL, "an unknown exception");
  }
}

inline absl::Status Null(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, " is null"));
}

inline absl::Status CheckProcess(pid_t made_in) {
  if (getpid() == made_in) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this handle was made before fork(): make a new one in the child");
}

template <typename T>
absl::Status ToEnum(absl::string_view what, std::uint32_t value, T last, T* out) {
  if (value > static_cast<std::uint32_t>(last)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", value, ", want 0 to ", static_cast<std::uint32_t>(last)));
  }
  *out = static_cast<T>(value);
  return absl::OkStatus();
}

inline absl::Status OutOfRange(absl::string_view what, std::size_t index, std::size_t count) {
  return absl::OutOfRangeError(absl::StrCat(what, " ", index, " of ", count));
}

// No array that is passed in is longer: what is, is not a count.
inline constexpr std::size_t kCountMax = std::size_t{1} << 20;
inline constexpr std::size_t kStructBytesMax = 4096;

absl::Status CheckStructBytes(absl::string_view name, std::size_t got, std::size_t least);
// That the bytes which a newer caller has beyond `known` are zero.
absl::Status CheckUnknownFields(absl::string_view name, const void* in, std::size_t got,
                                std::size_t known);

// A struct of the caller's version as this library's. `least` bytes are there in every version: up
// to the last field that has no default.
template <typename T>
absl::Status ReadStruct(absl::string_view name, const void* in, std::size_t least, T* out) {
  if (in == nullptr) return Null(name);
  std::size_t got = 0;
  std::memcpy(&got, in, sizeof(got));
  if (absl::Status s = CheckStructBytes(name, got, least); !s.ok()) return s;
  if (absl::Status s = CheckUnknownFields(name, in, got, sizeof(T)); !s.ok()) return s;
  *out = T{};
  std::memcpy(out, in, got < sizeof(T) ? got : sizeof(T));
  return absl::OkStatus();
}

// Null: all defaults.
template <typename T>
absl::Status ReadOptions(absl::string_view name, const void* in, T* out) {
  *out = T{};
  if (in == nullptr) return absl::OkStatus();
  return ReadStruct(name, in, sizeof(std::size_t), out);
}

// Calls `visit(index, element)` for each struct of an array.
template <typename T, typename Visit>
absl::Status ReadArray(absl::string_view name, const T* in, std::size_t count, std::size_t least,
                       Visit visit) {
  if (count > kCountMax) {
    return absl::InvalidArgumentError(absl::StrCat(count, " ", name, ", at most ", kCountMax));
  }
  if (count == 0) return absl::OkStatus();
  if (in == nullptr) return Null(name);
  std::size_t stride = 0;
  std::memcpy(&stride, in, sizeof(stride));
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const at = reinterpret_cast<const std::byte*>(in) + i * stride;
    std::size_t got = 0;
    std::memcpy(&got, at, sizeof(got));
    if (got != stride) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " ", i, ": struct_bytes ", got, ", that of the first is ", stride));
    }
    T element;
    if (absl::Status s = ReadStruct(name, at, least, &element); !s.ok()) return s;
    if (absl::Status s = visit(i, element); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Fills a struct of the caller's version.
template <typename T>
absl::Status WriteStruct(absl::string_view name, const T& value, T* out) {
  if (out == nullptr) return Null(name);
  std::size_t got = 0;
  std::memcpy(&got, out, sizeof(got));
  if (absl::Status s = CheckStructBytes(name, got, sizeof(std::size_t)); !s.ok()) return s;
  auto* const bytes = reinterpret_cast<std::byte*>(out);
  const std::size_t both = got < sizeof(T) ? got : sizeof(T);
  std::memcpy(bytes + sizeof(got), reinterpret_cast<const std::byte*>(&value) + sizeof(got),
              both - sizeof(got));
  std::memset(bytes + both, 0, got - both);
  return absl::OkStatus();
}

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_BORDER_H_
