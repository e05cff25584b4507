// What the files of TLS hold, and whether it can be used. Internal to client/ and service/.
#ifndef KVMILL_CLIENT_TLS_TLS_CHECKS_H_
#define KVMILL_CLIENT_TLS_TLS_CHECKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tls/tls_files.h"

namespace kvmill {

// The texts of the files of a TlsFiles; of what is not used, empty.
struct TlsTexts {
  std::string ca, certificate, key;

  friend bool operator==(const TlsTexts&, const TlsTexts&) = default;
};

// INVALID_ARGUMENT names the file that cannot be read, and why.
absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files);
// That they are PEM, that the certificate is valid today and the key is its: as CheckTlsFiles,
// which is these two. `files` names them in errors.
absl::Status CheckTlsTexts(const TlsFiles& files, const TlsTexts& texts);

// Unix time at which the first certificate of a text ends, which is what the file's owner shows;
// those behind it lead to an authority. `path` names it in errors.
absl::StatusOr<std::int64_t> CertificateEndSeconds(const std::string& path,
                                                   const std::string& text);

// What an end shows its certificate for. A node of a cluster does both.
struct TlsUses {
  bool server = false;
  bool client = false;
};
// Whether the certificate says that it is for these uses; one that says nothing is for all. And of
// one that is for both, which peers check by the same authorities, whether one of those in `ca`
// signed it. INVALID_ARGUMENT names the file and what it is not for. The texts passed
// CheckTlsTexts; without a certificate there is nothing to check.
absl::Status CheckTlsUses(const TlsFiles& files, const TlsTexts& texts, TlsUses uses);
absl::Status CheckTlsUses(const TlsFiles& files, TlsUses uses);

// Whether an authority in `ca` signed the certificate: INVALID_ARGUMENT when none did.
absl::Status CheckTlsAuthority(const TlsFiles& files, const TlsTexts& texts);
absl::Status CheckTlsAuthority(const TlsFiles& files);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TLS_TLS_CHECKS_H_
