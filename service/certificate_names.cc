#include "service/certificate_names.h"

#include <grpcpp/security/auth_context.h>

#include <memory>

namespace kvmill {

std::vector<std::string> CertificateNames(const grpc::ServerContextBase& call) {
  std::vector<std::string> names;
  const std::shared_ptr<const grpc::AuthContext> context = call.auth_context();
  if (context == nullptr) return names;
  const auto add = [&](const char* property) {
    for (const grpc::string_ref& name : context->FindPropertyValues(property)) {
      names.emplace_back(name.data(), name.size());
    }
  };
  // As gRPC names what it read there.
  add("peer_dns");
  add("peer_uri");
  if (names.empty()) add("x509_common_name");
  return names;
}

}  // namespace kvmill
