#include "client/tls/tls_files.h"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

template <typename T, void (*kFree)(T*)>
struct Free {
  void operator()(T* object) const { kFree(object); }
};
using Bio = std::unique_ptr<BIO, Free<BIO, BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES, GENERAL_NAMES_free>>;

absl::Status Wrong(const std::string& path, absl::string_view what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

absl::StatusOr<Bio> Open(const std::string& path) {
  Bio file(BIO_new_file(path.c_str(), "r"));
  if (file != nullptr) return file;
  return Wrong(path, absl::StrCat("cannot be read (", std::strerror(errno), ")"));
}

// OpenSSL would ask the terminal.
int NoPassword(char*, int, int, void*) { return 0; }

std::string Day(const ASN1_TIME* time) {
  tm day{};
  if (ASN1_TIME_to_tm(time, &day) != 1) return "an unknown time";
  char text[32];
  static_cast<void>(std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &day));
  return text;
}

absl::StatusOr<std::vector<Certificate>> ReadCertificates(const std::string& path) {
  KVMILL_ASSIGN_OR_RETURN(const Bio file, Open(path));
  std::vector<Certificate> certificates;
  while (X509* const read = PEM_read_bio_X509(file.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(read);
  }
  // It ends with "no start line" at the end of the file, and with another error in a broken one.
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates.empty()) return Wrong(path, "holds no certificate, want PEM");
  if (!at_end) {
    return Wrong(path, absl::StrCat("certificate ", certificates.size() + 1, " in it is broken"));
  }
  return certificates;
}

absl::Status CheckValidNow(const std::string& path, const X509* certificate) {
  const ASN1_TIME* const begin = X509_get0_notBefore(certificate);
  const ASN1_TIME* const end = X509_get0_notAfter(certificate);
  if (X509_cmp_current_time(begin) > 0) {
    return Wrong(path, absl::StrCat("the certificate is valid from ", Day(begin), " on only"));
  }
  if (X509_cmp_current_time(end) < 0) {
    return Wrong(path, absl::StrCat("the certificate ended at ", Day(end)));
  }
  return absl::OkStatus();
}

std::string Text(const ASN1_STRING* text) {
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<std::size_t>(ASN1_STRING_length(text)));
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  if (files.ca.empty()) {
    if (files.certificate.empty() && files.key.empty() && files.server_name.empty()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "a certificate, key or server name without the file of authorities (ca): with TLS both "
        "ends are checked");
  }
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(files.certificate.empty()
                                                       ? "a key without its certificate"
                                                       : "a certificate without its key",
                                                   ": want both or none"));
  }
  KVMILL_ASSIGN_OR_RETURN(const auto authorities, ReadCertificates(files.ca));
  static_cast<void>(authorities);  // One that is over does not harm the others.
  if (files.certificate.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const auto certificates, ReadCertificates(files.certificate));
  KVMILL_RETURN_IF_ERROR(CheckValidNow(files.certificate, certificates.front().get()));
  KVMILL_ASSIGN_OR_RETURN(const Bio file, Open(files.key));
  const Key key(PEM_read_bio_PrivateKey(file.get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) return Wrong(files.key, "holds no key, want PEM without a password");
  if (X509_check_private_key(certificates.front().get(), key.get()) != 1) {
    return Wrong(files.key, absl::StrCat("is not the key of ", files.certificate));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> NamesOfCertificate(const std::string& path) {
  KVMILL_ASSIGN_OR_RETURN(const auto certificates, ReadCertificates(path));
  const X509* const certificate = certificates.front().get();
  std::vector<std::string> found;
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) found.push_back(Text(name->d.dNSName));
    if (name->type == GEN_URI) found.push_back(Text(name->d.uniformResourceIdentifier));
  }
  if (!found.empty()) return found;
  X509_NAME* const subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at >= 0) found.push_back(Text(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at))));
  if (found.empty()) return Wrong(path, "the certificate has no DNS name, URI or common name");
  return found;
}

}  // namespace kvmill
