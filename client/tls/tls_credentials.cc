#include "client/tls/tls_credentials.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <map>

#include "storage/core/mutex.h"

namespace kvmill {
namespace {

using Provider = grpc::experimental::CertificateProviderInterface;

// Each has a thread that reads its files: clients of the same files share one.
std::shared_ptr<Provider> ProviderOf(const TlsFiles& files) {
  static Mutex mu;
  static auto* const providers = new std::map<TlsFiles, std::weak_ptr<Provider>>;
  TlsFiles key = files;
  key.server_name.clear();
  MutexLock lock(mu);
  std::weak_ptr<Provider>& known = (*providers)[key];
  std::shared_ptr<Provider> provider = known.lock();
  if (provider == nullptr) {
    provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        files.key, files.certificate, files.ca, kTlsRefreshSeconds);
    known = provider;
  }
  return provider;
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(ProviderOf(files));
  options.watch_root_certs();
  if (!files.certificate.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

void SetTlsArguments(const TlsFiles& files, grpc::ChannelArguments* arguments) {
  if (!files.server_name.empty()) arguments->SetSslTargetNameOverride(files.server_name);
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const TlsFiles& files,
                                                             bool certificate_optional) {
  grpc::experimental::TlsServerCredentialsOptions options(ProviderOf(files));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(certificate_optional
                                    ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace kvmill
