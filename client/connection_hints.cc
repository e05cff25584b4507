#include "client/connection_hints.h"

#include <grp.h>
#include <sys/stat.h>

#include <filesystem>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/explained.h"

namespace kvmill {
namespace {

// gRPC's texts: there is nothing else by which to tell.
constexpr absl::string_view kNoTlsThere = "wrong version number";
constexpr absl::string_view kWrongName = "Hostname Verification Check failed";
constexpr absl::string_view kWrongNameToo = "Custom verification check failed";
constexpr absl::string_view kUnknownAuthority = "certificate verify failed";
constexpr absl::string_view kHungUp[] = {"Socket closed", "Connection reset by peer",
                                         "Endpoint read failed", "Broken pipe"};

bool HungUp(absl::string_view message) {
  for (const absl::string_view text : kHungUp) {
    if (absl::StrContains(message, text)) return true;
  }
  return false;
}

std::string HintOf(const absl::Status& status, const ServerAddress& address, const TlsFiles& tls,
                   bool answered) {
  const absl::string_view message = status.message();
  if (status.code() == absl::StatusCode::kUnimplemented && message.empty()) {
    return "the daemon does not serve this there: its admin listener has admin commands alone; use "
           "the address of its --listen, or its socket (or the daemon is older than this client)";
  }
  if (status.code() != absl::StatusCode::kUnavailable || address.is_unix() || answered) return "";
  if (!tls.enabled()) {
    if (!HungUp(message)) return "";
    return "the daemon wants TLS, most likely: give tls-ca, and tls-cert with tls-key, or a token";
  }
  if (absl::StrContains(message, kNoTlsThere)) {
    return "what listens there speaks no TLS: a daemon with --insecure, or another port of it; "
           "leave out tls-ca, tls-cert and tls-key, or give the right port";
  }
  if (absl::StrContains(message, kWrongName) || absl::StrContains(message, kWrongNameToo)) {
    return absl::StrCat("the daemon's certificate is not of \"",
                        tls.server_name.empty() ? address.tcp.host : tls.server_name,
                        "\": give tls-server-name, a name that the certificate has");
  }
  if (absl::StrContains(message, kUnknownAuthority)) {
    return absl::StrCat("no authority in tls-ca ", tls.ca, " vouches for the daemon's certificate");
  }
  if (!HungUp(message)) return "";
  return tls.certificate.empty()
             ? "the daemon wants a certificate of its clients, most likely: give tls-cert and "
               "tls-key"
             : "the daemon does not believe this client's certificate, most likely: is tls-cert "
               "valid, and of an authority in the daemon's --tls-ca?";
}

}  // namespace

absl::Status ExplainConnection(absl::Status status, const ServerAddress& address,
                               const TlsFiles& tls, bool answered) {
  if (status.ok()) return status;
  const std::string hint = HintOf(status, address, tls, answered);
  if (hint.empty()) return status;
  const absl::string_view message = status.message();
  absl::Status explained(status.code(),
                         message.empty() ? hint : absl::StrCat(message, " (", hint, ")"));
  explained.SetPayload(kExplainedPayload, absl::Cord());
  return explained;
}

std::string WhoMayConnect(const std::string& socket_path) {
  struct stat info {};
  if (stat(socket_path.c_str(), &info) != 0) {
    const std::string folder = std::filesystem::path(socket_path).parent_path().string();
    if (folder.empty() || stat(folder.c_str(), &info) != 0) return "";
  }
  std::vector<char> buffer(16 << 10);
  group entry{};
  group* found = nullptr;
  getgrgid_r(info.st_gid, &entry, buffer.data(), buffer.size(), &found);
  return absl::StrCat(
      ": it lets in root, uid ", info.st_uid, " and members of group ",
      found != nullptr ? absl::StrCat("\"", found->gr_name, "\"") : absl::StrCat(info.st_gid));
}

}  // namespace kvmill
