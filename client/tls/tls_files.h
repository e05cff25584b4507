// TLS of connections over TCP: which files one end shows and believes. The files are PEM.
#ifndef KVMILL_CLIENT_TLS_TLS_FILES_H_
#define KVMILL_CLIENT_TLS_TLS_FILES_H_

#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvmill {

// Files are read again when they change, for connections that are made from then on. While they do
// not fit each other (a certificate without its key, one that ended) those of before stay in use,
// and a warning is logged. A new directory behind a symbolic link replaces all of them at once.
struct TlsFiles {
  std::string ca;           // Authorities of the other end's certificate. Empty: no TLS.
  std::string certificate;  // This end's, with what leads to an authority behind it.
  std::string key;          // Of `certificate`, unencrypted. Both or none.
  // A name that servers' certificates have, where it is not the host of their address: one name for
  // all nodes of a cluster, say.
  std::string server_name;

  bool enabled() const { return !ca.empty(); }
  bool operator<(const TlsFiles& other) const {
    return std::tie(ca, certificate, key, server_name) <
           std::tie(other.ca, other.certificate, other.key, other.server_name);
  }
};

// Reads the files. INVALID_ARGUMENT names the file and what is wrong with it: not there, not PEM, a
// key that is another certificate's, a certificate that is not valid today, one of the files
// without the others.
absl::Status CheckTlsFiles(const TlsFiles& files);

// The names of the first certificate in a file: its DNS names and URIs, or its common name where it
// has neither.
absl::StatusOr<std::vector<std::string>> NamesOfCertificate(const std::string& path);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TLS_TLS_FILES_H_
