#include "client/tls/tls_files.h"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/tls/tls_checks.h"
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
using Store = std::unique_ptr<X509_STORE, Free<X509_STORE, X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Free<X509_STORE_CTX, X509_STORE_CTX_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES, GENERAL_NAMES_free>>;

// Which file it is, by the name of its flag, and what is wrong with it.
absl::Status Wrong(absl::string_view flag, const std::string& path, absl::string_view what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(flag, " ", path, ": ", what));
}

constexpr absl::string_view kCa = "tls-ca";
constexpr absl::string_view kCertificate = "tls-cert";
constexpr absl::string_view kKey = "tls-key";
constexpr std::size_t kFileBytesMax = 1 << 20;

absl::StatusOr<std::string> ReadFile(absl::string_view flag, const std::string& path) {
  if (path.empty()) return std::string();
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  const auto unreadable = [&] {
    return Wrong(flag, path, absl::StrCat("cannot be read (", std::strerror(errno), ")"));
  };
  if (file == nullptr) return unreadable();
  std::string text(kFileBytesMax + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0) return unreadable();
  if (text.size() > kFileBytesMax) {
    return Wrong(flag, path, absl::StrCat("has more than ", kFileBytesMax, " bytes"));
  }
  return text;
}

// Of the text, which outlives it.
Bio Open(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
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

absl::StatusOr<std::vector<Certificate>> ParseCertificates(absl::string_view flag,
                                                           const std::string& path,
                                                           const std::string& text) {
  const Bio file = Open(text);
  std::vector<Certificate> certificates;
  while (X509* const read = PEM_read_bio_X509(file.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(read);
  }
  // It ends with "no start line" at the end of the file, and with another error in a broken one.
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates.empty()) return Wrong(flag, path, "holds no certificate, want PEM");
  if (!at_end) {
    return Wrong(flag, path,
                 absl::StrCat("certificate ", certificates.size() + 1, " in it is broken"));
  }
  return certificates;
}

absl::Status CheckValidNow(const std::string& path, const X509* certificate) {
  const ASN1_TIME* const begin = X509_get0_notBefore(certificate);
  const ASN1_TIME* const end = X509_get0_notAfter(certificate);
  if (X509_cmp_current_time(begin) > 0) {
    return Wrong(kCertificate, path,
                 absl::StrCat("the certificate is valid from ", Day(begin), " on only"));
  }
  if (X509_cmp_current_time(end) < 0) {
    return Wrong(kCertificate, path, absl::StrCat("the certificate ended at ", Day(end)));
  }
  return absl::OkStatus();
}

std::string Text(const ASN1_STRING* text) {
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<std::size_t>(ASN1_STRING_length(text)));
}

}  // namespace

absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files) {
  TlsTexts texts;
  KVMILL_ASSIGN_OR_RETURN(texts.ca, ReadFile(kCa, files.ca));
  KVMILL_ASSIGN_OR_RETURN(texts.certificate, ReadFile(kCertificate, files.certificate));
  KVMILL_ASSIGN_OR_RETURN(texts.key, ReadFile(kKey, files.key));
  return texts;
}

absl::Status CheckTlsTexts(const TlsFiles& files, const TlsTexts& texts) {
  // Of the authorities one that is over does not harm the others.
  KVMILL_RETURN_IF_ERROR(ParseCertificates(kCa, files.ca, texts.ca).status());
  if (files.certificate.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const auto certificates,
                          ParseCertificates(kCertificate, files.certificate, texts.certificate));
  KVMILL_RETURN_IF_ERROR(CheckValidNow(files.certificate, certificates.front().get()));
  const Key key(PEM_read_bio_PrivateKey(Open(texts.key).get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) return Wrong(kKey, files.key, "holds no key, want PEM without a password");
  if (X509_check_private_key(certificates.front().get(), key.get()) != 1) {
    return Wrong(kKey, files.key, absl::StrCat("is not the key of ", files.certificate));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int64_t> CertificateEndSeconds(const std::string& path,
                                                   const std::string& text) {
  KVMILL_ASSIGN_OR_RETURN(const auto certificates, ParseCertificates(kCertificate, path, text));
  tm end{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificates.front().get()), &end) != 1) {
    return Wrong(kCertificate, path, "the certificate does not say when it ends");
  }
  return static_cast<std::int64_t>(timegm(&end));
}

absl::Status CheckTlsFiles(const TlsFiles& files) {
  if (files.ca.empty()) {
    if (files.certificate.empty() && files.key.empty() && files.server_name.empty()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "a certificate, key or server name without the file of authorities (tls-ca): with TLS both "
        "ends are checked");
  }
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(files.certificate.empty()
                                                       ? "a key without its certificate (tls-cert)"
                                                       : "a certificate without its key (tls-key)",
                                                   ": want both or none"));
  }
  KVMILL_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(files));
  return CheckTlsTexts(files, texts);
}

absl::Status CheckTlsAuthority(const TlsFiles& files, const TlsTexts& texts) {
  KVMILL_ASSIGN_OR_RETURN(const auto authorities, ParseCertificates(kCa, files.ca, texts.ca));
  KVMILL_ASSIGN_OR_RETURN(const auto chain,
                          ParseCertificates(kCertificate, files.certificate, texts.certificate));
  const Store store(X509_STORE_new());
  for (const Certificate& authority : authorities)
    X509_STORE_add_cert(store.get(), authority.get());
  // The stack borrows what leads from the certificate to an authority.
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> between(
      sk_X509_new_null(), [](STACK_OF(X509) * stack) { sk_X509_free(stack); });
  for (std::size_t i = 1; i < chain.size(); ++i) sk_X509_push(between.get(), chain[i].get());
  const StoreContext context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), chain.front().get(), between.get());
  // An authority is who is listed, whoever signed it.
  X509_STORE_CTX_set_flags(context.get(), X509_V_FLAG_PARTIAL_CHAIN);
  if (X509_verify_cert(context.get()) == 1) return absl::OkStatus();
  const char* const why = X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get()));
  return Wrong(kCertificate, files.certificate,
               absl::StrCat("no authority in tls-ca ", files.ca, " vouches for it (", why, ")"));
}

absl::Status CheckTlsUses(const TlsFiles& files, const TlsTexts& texts, TlsUses uses) {
  if (files.certificate.empty()) return absl::OkStatus();
  KVMILL_ASSIGN_OR_RETURN(const auto chain,
                          ParseCertificates(kCertificate, files.certificate, texts.certificate));
  const struct {
    bool wanted;
    int purpose;
    const char* name;
  } all[] = {{uses.server, X509_PURPOSE_SSL_SERVER, "serverAuth"},
             {uses.client, X509_PURPOSE_SSL_CLIENT, "clientAuth"}};
  for (const auto& use : all) {
    if (!use.wanted || X509_check_purpose(chain.front().get(), use.purpose, 0) == 1) continue;
    return Wrong(
        kCertificate, files.certificate,
        absl::StrCat(
            "the certificate is not for ", use.name, ": want that in its extended key usage",
            uses.server && uses.client ? "; a node shows it to its clients and to its peers" : ""));
  }
  if (!uses.server || !uses.client) return absl::OkStatus();
  return CheckTlsAuthority(files, texts);
}

absl::Status CheckTlsUses(const TlsFiles& files, TlsUses uses) {
  KVMILL_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(files));
  return CheckTlsUses(files, texts, uses);
}

absl::Status CheckTlsAuthority(const TlsFiles& files) {
  KVMILL_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(files));
  return CheckTlsAuthority(files, texts);
}

absl::StatusOr<std::vector<std::string>> NamesOfCertificate(const std::string& path) {
  KVMILL_ASSIGN_OR_RETURN(const std::string text, ReadFile(kCertificate, path));
  KVMILL_ASSIGN_OR_RETURN(const auto certificates, ParseCertificates(kCertificate, path, text));
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
  if (found.empty())
    return Wrong(kCertificate, path, "the certificate has no DNS name, URI or common name");
  return found;
}

}  // namespace kvmill
