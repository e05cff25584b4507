// What etcd's errors mean. Some differ in their text alone, as etcd's API has it; nobody else looks
// at texts.
#ifndef KVMILL_SERVICE_ETCD_ETCD_ERRORS_H_
#define KVMILL_SERVICE_ETCD_ETCD_ERRORS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmill {

// With a code of registry.h and "etcd SERVER: " before the message. UNAUTHENTICATED: the token is
// old or missing, or user and password are wrong. What a server that wants TLS does to a connection
// without it has a hint at that; others may do the same.
absl::Status FromEtcd(const grpc::Status& status, absl::string_view server, bool tls,
                      absl::string_view user = "");

// The reason with which etcd cancels a watch.
absl::Status FromCancelReason(absl::string_view reason, absl::string_view server);

// Another server of the cluster may do better.
bool IsServersFault(const absl::Status& status);

// The answer to Authenticate of an etcd that asks nobody for a password.
bool IsAuthNotEnabled(const absl::Status& status);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_ERRORS_H_
