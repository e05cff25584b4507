#include "service/etcd/etcd_errors.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

// All three come as INVALID_ARGUMENT.
constexpr absl::string_view kWantsToken[] = {
    "etcdserver: user name is empty",
    "etcdserver: authentication failed, invalid user ID or password",
    "etcdserver: revision of auth store is old",
};
constexpr absl::string_view kAuthNotEnabled = "etcdserver: authentication is not enabled";
constexpr absl::string_view kPermissionDenied = "etcdserver: permission denied";
// gRPC's, for a peer that hung up instead of answering.
constexpr absl::string_view kHungUp[] = {"Socket closed", "Connection reset by peer",
                                         "Endpoint read failed"};
constexpr absl::string_view kInvalidToken = "etcdserver: invalid auth token";

std::string HintOfDenied(absl::string_view user) {
  return absl::StrCat(" (", user.empty() ? "the user" : absl::StrCat("user \"", user, "\""),
                      " of --etcd-user has to be allowed to read and write what is below the "
                      "prefix of --cluster)");
}

}  // namespace

absl::Status FromEtcd(const grpc::Status& status, absl::string_view server, bool tls,
                      absl::string_view user) {
  if (status.ok()) return absl::OkStatus();
  auto code = static_cast<absl::StatusCode>(status.error_code());  // The same numbers.
  for (absl::string_view text : kWantsToken) {
    if (status.error_message() == text) code = absl::StatusCode::kUnauthenticated;
  }
  std::string hint;
  for (absl::string_view text : kHungUp) {
    if (code == absl::StatusCode::kUnavailable && absl::StrContains(status.error_message(), text)) {
      hint = tls ? " (if it wants a certificate: --etcd-cert FILE, --etcd-key FILE)"
                 : " (if it wants TLS: --etcd-ca FILE)";
    }
  }
  if (code == absl::StatusCode::kPermissionDenied) hint = HintOfDenied(user);
  if (status.error_message() == kWantsToken[0]) {
    hint = " (it wants a user: --etcd-user NAME)";
  }
  return absl::Status(code, absl::StrCat("etcd ", server, ": ", status.error_message(), hint));
}

absl::Status FromCancelReason(absl::string_view reason, absl::string_view server) {
  std::string hint;
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  if (absl::StrContains(reason, kPermissionDenied)) {
    code = absl::StatusCode::kPermissionDenied;
    hint = HintOfDenied("");
  }
  if (absl::StrContains(reason, kInvalidToken)) code = absl::StatusCode::kUnauthenticated;
  return absl::Status(code, absl::StrCat("etcd ", server, ": watch cancelled: ",
                                         reason.empty() ? "no reason given" : reason, hint));
}

bool IsServersFault(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

bool IsAuthNotEnabled(const absl::Status& status) {
  return absl::EndsWith(status.message(), kAuthNotEnabled);
}

}  // namespace kvmill
