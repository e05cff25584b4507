// Keys, headers and both ciphers of encrypted files. What is expected was computed by another
// implementation (HKDF by hand, AES block by block, XTS by its definition).
#include "storage/file_cipher.h"

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/core/checksum.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kGoldenKey[] = "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f";

template <std::size_t kBytes>
void FromHex(const std::string& hex, std::array<std::byte, kBytes>* out) {
  const std::string bytes = absl::HexStringToBytes(hex);
  ASSERT_EQ(bytes.size(), kBytes);
  std::memcpy(out->data(), bytes.data(), kBytes);
}

// A header with the nonce 00 01 02 ...
std::vector<std::byte> GoldenHeader(CipherMode mode, const std::string& proof) {
  FileHeader header{};
  std::memcpy(header.magic, kFileHeaderMagic, sizeof(header.magic));
  header.version = 1;
  header.mode = mode;
  header.unit_bytes = 4096;
  FromHex("e5a77672223bbe58", &header.key);
  for (std::size_t i = 0; i < 32; ++i) header.nonce[i] = static_cast<std::byte>(i);
  FromHex(proof, &header.proof);
  std::vector<std::byte> bytes(kFileHeaderBytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = Checksum(bytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

std::vector<std::byte> StreamHeader() {
  return GoldenHeader(CipherMode::kStream, "fbc294467d3eecbe0ae5d847be6c0839");
}
std::vector<std::byte> UnitsHeader() {
  return GoldenHeader(CipherMode::kUnits, "7563820902a0925e2db6c8aa56ef8fd5");
}

std::string GoldenText() {
  std::string text;
  for (int i = 0; i < 60; ++i) text += static_cast<char>(7 * i + 3);
  return text;
}

TEST(FileCipherTest, AStreamIsWhatTheFormatSays) {
  const auto keys = EncryptionKeys::Parse(kGoldenKey);
  ASSERT_TRUE(keys.ok()) << keys.status();
  const auto file = FileCipher::Open(**keys, CipherMode::kStream, StreamHeader());
  ASSERT_TRUE(file.ok()) << file.status();
  std::string text = GoldenText();
  StreamCipher(*file).Run(5, text.data(), text.size(), text.data());
  EXPECT_EQ(
      absl::BytesToHexString(text),
      "fac2482570090c7f8d2de3b442e1426b075fc8b5e6b9e6f7f56ab40c64c03794956fb64bf909cf874af534d"
      "1869935e2d4b58cdafb2639e2dbc3fe13");
}

TEST(FileCipherTest, UnitsAreWhatTheFormatSays) {
  const auto keys = EncryptionKeys::Parse(kGoldenKey);
  ASSERT_TRUE(keys.ok()) << keys.status();
  const auto file = FileCipher::Open(**keys, CipherMode::kUnits, UnitsHeader());
  ASSERT_TRUE(file.ok()) << file.status();
  UnitCipher cipher(*file, UnitCipher::Direction::kEncrypt);
  std::string text = GoldenText();
  cipher.Run(3, text.data(), text.size(), text.data());
  EXPECT_EQ(
      absl::BytesToHexString(text),
      "091b825c7ec2a9230b69d8971cf123d594ce58ddd95e0a9976063e6c71a45162abe38675c99adf45c2c6b7f"
      "4bb7c98da1c3531f6b508f7e35a564d5c");
  text = GoldenText().substr(0, 7);
  cipher.Run(9, text.data(), text.size(), text.data());
  EXPECT_EQ(absl::BytesToHexString(text), "fe3169c8d612ef");
}

TEST(FileCipherTest, EveryPieceOfAStreamIsAsInTheWhole) {
  const auto keys = TestKeys({1});
  const FileCipher file(*keys, CipherMode::kStream);
  std::vector<std::byte> plain(300);
  FillPage(1, absl::MakeSpan(plain));
  const std::string text(reinterpret_cast<const char*>(plain.data()), plain.size());
  std::string whole = text;
  StreamCipher cipher(file);
  cipher.Run(0, text.data(), text.size(), whole.data());
  EXPECT_NE(whole, text);
  for (std::size_t offset = 0; offset < text.size(); ++offset) {
    for (const std::size_t bytes : {1u, 15u, 16u, 17u, 100u}) {
      std::string piece = text.substr(offset, bytes);
      cipher.Run(offset, piece.data(), piece.size(), piece.data());
      ASSERT_EQ(piece, whole.substr(offset, bytes)) << offset << " " << bytes;
    }
  }
}

TEST(FileCipherTest, UnitsOfEveryLengthComeBack) {
  const auto keys = TestKeys({1});
  const FileCipher file(*keys, CipherMode::kUnits);
  UnitCipher encrypt(file, UnitCipher::Direction::kEncrypt);
  UnitCipher decrypt(file, UnitCipher::Direction::kDecrypt);
  for (std::size_t bytes : {1u, 15u, 16u, 17u, 31u, 32u, 33u, 4095u, 4096u, 4097u, 4111u, 4112u,
                            3u * 4096 + 5, 3u * 4096 + 100}) {
    std::vector<std::byte> plain(bytes);
    FillPage(bytes, absl::MakeSpan(plain));
    const std::string text(reinterpret_cast<const char*>(plain.data()), plain.size());
    std::string there = text;
    encrypt.Run(1, text.data(), bytes, there.data());
    EXPECT_NE(there, text) << bytes;
    std::string back(bytes, '\0');
    decrypt.Run(1, there.data(), bytes, back.data());
    EXPECT_EQ(back, text) << bytes;
  }
}

// What a known page of a file is changed to is nobody's choice: 16 bytes become others, all of
// them.
TEST(FileCipherTest, AFlippedBitOfAUnitMakesSixteenBytesUnforeseeable) {
  const auto keys = TestKeys({1});
  const FileCipher file(*keys, CipherMode::kUnits);
  const std::string text(4096, 'x');
  std::string there = text;
  UnitCipher(file, UnitCipher::Direction::kEncrypt).Run(1, text.data(), 4096, there.data());
  there[1000] = static_cast<char>(there[1000] ^ 1);
  std::string back = there;
  UnitCipher(file, UnitCipher::Direction::kDecrypt).Run(1, there.data(), 4096, back.data());
  int changed = 0;
  for (std::size_t i = 0; i < back.size(); ++i) {
    if (back[i] == text[i]) continue;
    EXPECT_EQ(i / 16, 1000u / 16);
    ++changed;
  }
  EXPECT_GT(changed, 8);
}

TEST(FileCipherTest, TwoFilesOfOneKeyShareNothing) {
  const auto keys = TestKeys({1});
  const std::string zeros(4096, '\0');
  for (const CipherMode mode : {CipherMode::kStream, CipherMode::kUnits}) {
    std::string seen[2];
    for (std::string& bytes : seen) {
      const FileCipher file(*keys, mode);
      bytes = zeros;
      if (mode == CipherMode::kStream) {
        StreamCipher(file).Run(0, zeros.data(), zeros.size(), bytes.data());
      } else {
        UnitCipher(file, UnitCipher::Direction::kEncrypt)
            .Run(1, zeros.data(), zeros.size(), bytes.data());
      }
    }
    for (std::size_t at = 0; at < zeros.size(); at += 16) {
      EXPECT_NE(seen[0].substr(at, 16), seen[1].substr(at, 16));
      EXPECT_NE(seen[0].substr(at, 16), seen[0].substr((at + 16) % zeros.size(), 16));
    }
  }
}

TEST(FileCipherTest, AHeaderOpensWithItsKeyAndNoOther) {
  const auto keys = TestKeys({1, 2});
  const FileCipher file(*keys, CipherMode::kStream);
  std::vector<std::byte> header(kFileHeaderBytes);
  file.WriteHeader(reinterpret_cast<char*>(header.data()));
  EXPECT_TRUE(FileCipher::Open(*keys, CipherMode::kStream, header).ok());
  EXPECT_TRUE(FileCipher::Open(*TestKeys({3, 1}), CipherMode::kStream, header).ok());
  const absl::Status other =
      FileCipher::Open(*TestKeys({2, 3}), CipherMode::kStream, header).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(other.message(), HasSubstr(ToHex(keys->current().id())));
  EXPECT_TRUE(absl::IsDataLoss(FileCipher::Open(*keys, CipherMode::kUnits, header).status()));
  for (std::size_t i = 0; i < header.size(); i += i < 100 ? 1 : 97) {
    std::vector<std::byte> damaged = header;
    damaged[i] ^= std::byte{0x10};
    EXPECT_TRUE(absl::IsDataLoss(FileCipher::Open(*keys, CipherMode::kStream, damaged).status()))
        << i;
  }
  header.pop_back();
  EXPECT_TRUE(absl::IsDataLoss(FileCipher::Open(*keys, CipherMode::kStream, header).status()));
  EXPECT_TRUE(absl::IsDataLoss(FileCipher::Open(*keys, CipherMode::kStream, {}).status()));
}

// One that names a key it was not written with, and has the right checksum.
TEST(FileCipherTest, AHeaderThatProvesNothingIsDamaged) {
  const auto keys = EncryptionKeys::Parse(kGoldenKey);
  ASSERT_TRUE(keys.ok());
  const absl::Status status =
      FileCipher::Open(**keys, CipherMode::kStream,
                       GoldenHeader(CipherMode::kStream, "7563820902a0925e2db6c8aa56ef8fd5"))
          .status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

TEST(EncryptionKeysTest, ReadsLinesAndSaysWhatIsWrongWithoutSayingKeys) {
  const std::string a = KeyText(1);
  const std::string b = KeyText(2);
  const auto keys = EncryptionKeys::Parse(absl::StrCat("# for new files\n", a, "\n# old\r\n  ", b));
  ASSERT_TRUE(keys.ok()) << keys.status();
  ASSERT_EQ((*keys)->keys().size(), 2u);
  EXPECT_EQ((*keys)->current().id(), TestKeys({1})->current().id());
  EXPECT_EQ((*keys)->Find(TestKeys({2})->current().id()), 1u);
  EXPECT_FALSE((*keys)->Find(TestKeys({3})->current().id()).has_value());
  std::string many;
  for (int i = 0; i < 17; ++i) many += KeyText(i);
  const struct {
    std::string text;
    const char* says;
  } refused[] = {
      {"", "no key (openssl rand -hex 32"},
      {"\n# nothing\n", "no key"},
      {a + "0" + b, "line 2: a key of 65 characters, want 64 hexadecimal digits"},
      {a.substr(0, 62), "line 1: a key of 62 characters"},
      {"\ng" + a.substr(1), "line 2: character 1 is no hexadecimal digit"},
      {a.substr(0, 63) + "!", "line 1: character 64 is no hexadecimal digit"},
      {std::string(64, '0'), "line 1: a key of equal bytes is none"},
      {a + b + a, "line 3: the key of line 1 again"},
      {many, "line 17: more than 16 keys"},
  };
  for (const auto& c : refused) {
    const absl::Status status = EncryptionKeys::Parse(c.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(c.says));
    EXPECT_THAT(status.message(), Not(HasSubstr(a.substr(1, 8))));
  }
}

TEST(EncryptionKeysTest, AFileThatOthersCanReadIsRefused) {
  const TempDirectory temp;
  const std::string path = temp.Sub("key");
  std::ofstream(path) << KeyText(1);
  for (const mode_t mode : {0600, 0400, 0440, 0640}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_TRUE(EncryptionKeys::ReadFile(path).ok()) << std::oct << mode;
  }
  for (const mode_t mode : {0644, 0604, 0602, 0620, 0660}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    const absl::Status status = EncryptionKeys::ReadFile(path).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("chmod 0600"));
  }
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  const std::string link = temp.Sub("link");
  std::filesystem::create_symlink(path, link);
  EXPECT_TRUE(EncryptionKeys::ReadFile(link).ok()) << "as Kubernetes mounts secrets";
  std::ofstream(path, std::ios::app) << std::string(20000, '#');
  EXPECT_THAT(EncryptionKeys::ReadFile(path).status().message(), HasSubstr("too many"));
  std::ofstream(path) << "short\n";
  EXPECT_THAT(EncryptionKeys::ReadFile(path).status().message(), HasSubstr(path + ": line 1: "));
  EXPECT_TRUE(absl::IsNotFound(EncryptionKeys::ReadFile(temp.Sub("absent")).status()));
  std::filesystem::create_directory(temp.Sub("folder"));
  ASSERT_EQ(chmod(temp.Sub("folder").c_str(), 0700), 0);
  EXPECT_THAT(EncryptionKeys::ReadFile(temp.Sub("folder")).status().message(),
              HasSubstr("is no file"));
}

}  // namespace
}  // namespace kvmill
