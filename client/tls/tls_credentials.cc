#include "client/tls/tls_credentials.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <chrono>
#include <map>
#include <memory>

#include "client/tls/checked_tls_files.h"
#include "client/tls/tls_checks.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

using Provider = grpc::experimental::CertificateProviderInterface;

// Of both together kTlsRefreshSeconds: until the files are looked at, and until gRPC looks at what
// was taken of them.
constexpr std::chrono::seconds kLookEvery{kTlsRefreshSeconds - 1};
constexpr unsigned kGrpcLooksEverySeconds = 1;

struct Source {
  explicit Source(const TlsFiles& files)
      : checked(files),
        provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
            checked.copies().key, checked.copies().certificate, checked.copies().ca,
            kGrpcLooksEverySeconds)) {
    checked.Watch(kLookEvery);
  }
  CheckedTlsFiles checked;
  const std::shared_ptr<Provider> provider;
};

// Each has threads that read its files: connections of the same files share one. It is never given
// up, as gRPC does not say when it needs it no more.
struct Sources {
  Mutex mu;
  std::map<TlsFiles, std::unique_ptr<Source>> of_files ABSL_GUARDED_BY(mu);
};
Sources& AllSources() {
  static auto* const sources = new Sources;
  return *sources;
}

TlsFiles KeyOf(TlsFiles files) {
  files.server_name.clear();
  return files;
}

const std::shared_ptr<Provider>& ProviderOf(const TlsFiles& files, TlsUses uses) {
  Sources& sources = AllSources();
  const TlsFiles key = KeyOf(files);
  MutexLock lock(sources.mu);
  std::unique_ptr<Source>& source = sources.of_files[key];
  if (source == nullptr) source = std::make_unique<Source>(key);
  source->checked.UseAs(uses);
  return source->provider;
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(ProviderOf(files, {.server = false, .client = true}));
  options.watch_root_certs();
  if (!files.certificate.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

void SetTlsArguments(const TlsFiles& files, grpc::ChannelArguments* arguments) {
  if (!files.server_name.empty()) arguments->SetSslTargetNameOverride(files.server_name);
}

std::int64_t ShownCertificateEndSeconds(const TlsFiles& files) {
  Sources& sources = AllSources();
  MutexLock lock(sources.mu);
  const auto found = sources.of_files.find(KeyOf(files));
  return found == sources.of_files.end() ? 0 : found->second->checked.certificate_end_seconds();
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const TlsFiles& files,
                                                             bool certificate_optional) {
  grpc::experimental::TlsServerCredentialsOptions options(
      ProviderOf(files, {.server = true, .client = false}));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(certificate_optional
                                    ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace kvmill
