#include "client/cli/npy.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

using ::testing::HasSubstr;

std::string Npy(absl::string_view dictionary, std::size_t value_bytes, int version = 1) {
  std::string bytes = "\x93NUMPY";
  bytes.push_back(static_cast<char>(version));
  bytes.push_back('\0');
  const std::size_t header_bytes = dictionary.size() + 1;
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
    bytes.push_back(static_cast<char>(header_bytes >> (8 * i)));
  }
  absl::StrAppend(&bytes, dictionary, "\n");
  for (std::size_t i = 0; i < value_bytes; ++i) bytes.push_back(static_cast<char>(i));
  return bytes;
}

std::string Dictionary(absl::string_view descr, absl::string_view shape,
                       absl::string_view order = "False") {
  return absl::StrCat("{'descr': '", descr, "', 'fortran_order': ", order, ", 'shape': ", shape,
                      ", }");
}

TEST(NpyTest, ReadsBothVersionsAndKeysInAnyOrder) {
  const std::string any_order = "{\"shape\":(2,1,3),\"fortran_order\":False,\"descr\":\"<f2\"}";
  for (const std::string& bytes :
       {Npy(Dictionary("<f2", "(2, 1, 3)"), 12), Npy(Dictionary("<f2", "(2, 1, 3)"), 12, 2),
        Npy(any_order, 12), Npy(Dictionary("<f2", "(2, 1, 3,)"), 12)}) {
    const absl::StatusOr<Tensor> tensor = ParseNpy(bytes, DType::kFloat16);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->ShapeString(), "[2, 1, 3]");
    EXPECT_EQ(tensor->values.size(), 6u);
    EXPECT_EQ(tensor->values[1], 0x0302);
  }
}

TEST(NpyTest, BFloat16ComesAsUnsignedOrVoid) {
  for (const char* descr : {"<u2", "<V2", "|V2"}) {
    const std::string bytes = Npy(Dictionary(descr, "(1, 1, 2)"), 4);
    EXPECT_TRUE(ParseNpy(bytes, DType::kBFloat16).ok()) << descr;
    const absl::Status as_fp16 = ParseNpy(bytes, DType::kFloat16).status();
    EXPECT_THAT(std::string(as_fp16.message()), HasSubstr("--bf16")) << descr;
  }
  EXPECT_FALSE(ParseNpy(Npy(Dictionary("<f2", "(1, 1, 2)"), 4), DType::kBFloat16).ok());
}

struct BadFile {
  const char* name;
  std::string bytes;
  const char* says;
};

TEST(NpyTest, BadFilesAreRefusedWithOneClearSentence) {
  const std::string good = Dictionary("<f2", "(2, 1, 3)");
  std::string huge_header = Npy(good, 12, 2);
  huge_header[11] = '\x7f';
  std::string version3 = Npy(good, 12);
  version3[6] = 3;
  const BadFile table[] = {
      {"empty", "", "truncated"},
      {"magic", "PK\x03\x04 and so on", "not a .npy file"},
      {"magic only", std::string("\x93NUMPY\x01\x00", 8), "truncated"},
      {"header length", std::string("\x93NUMPY\x02\x00\x10\x00", 10), "truncated"},
      {"version 3", version3, "version 3"},
      {"header longer than the file", Npy(good, 12).substr(0, 40), "truncated"},
      {"header of 2 GiB", huge_header, "at most 65536"},
      {"one byte short", Npy(good, 11), "truncated"},
      {"one byte long", Npy(good, 13), "trailing bytes"},
      {"no values", Npy(good, 0), "truncated"},
      {"fortran order", Npy(Dictionary("<f2", "(2, 1, 3)", "True"), 12), "C order"},
      {"big-endian", Npy(Dictionary(">f2", "(2, 1, 3)"), 12), "big-endian"},
      {"object", Npy(Dictionary("|O", "(2, 1, 3)"), 12), "object arrays"},
      {"fp32", Npy(Dictionary("<f4", "(2, 1, 3)"), 24), "want '<f2'"},
      {"structured", Npy("{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (1,)}", 2),
       "structured"},
      {"two dimensions", Npy(Dictionary("<f2", "(2, 3)"), 12), "2 dimensions"},
      {"four dimensions", Npy(Dictionary("<f2", "(1, 2, 1, 3)"), 12), "4 dimensions"},
      {"scalar", Npy(Dictionary("<f2", "()"), 2), "0 dimensions"},
      {"empty dimension", Npy(Dictionary("<f2", "(0, 1, 3)"), 0), "1 to"},
      {"dimension past 32 bits", Npy(Dictionary("<f2", "(4294967296, 1, 1)"), 0), "1 to"},
      {"product past 64 bits", Npy(Dictionary("<f2", "(4294967295, 4294967295, 4294967295)"), 0),
       "fit the file"},
      {"product wraps to the size", Npy(Dictionary("<f2", "(2147483648, 2147483648, 2)"), 0),
       "fit the file"},
      {"dimension past 64 bits", Npy(Dictionary("<f2", "(99999999999999999999, 1, 1)"), 0),
       "a dimension"},
      {"negative dimension", Npy(Dictionary("<f2", "(-1, 1, 1)"), 0), "a dimension"},
      {"missing key", Npy("{'descr': '<f2', 'shape': (2, 1, 3)}", 12), "lacks"},
      {"key twice", Npy("{'descr': '<f2', 'descr': '<f2', 'shape': (2, 1, 3)}", 12), "repeated"},
      {"unknown key", Npy("{'descr': '<f2', 'x': 1}", 12), "unknown"},
      {"code instead of a value",
       Npy("{'descr': '<f2', 'fortran_order': print(1), 'shape': (2, 1, 3)}", 12), "True or False"},
      {"something after the dictionary", Npy(good + " 1", 12), "the end"},
      {"no dictionary", Npy("[1, 2, 3]", 12), "'{'"},
      {"dictionary without an end", Npy("{'descr': '<f2'", 12), "',' or '}'"},
      {"string without an end", Npy("{'descr", 12), "a key"},
      {"empty header", Npy("", 12), "'{'"},
  };
  for (const BadFile& bad : table) {
    const absl::StatusOr<Tensor> tensor = ParseNpy(bad.bytes, DType::kFloat16);
    ASSERT_FALSE(tensor.ok()) << bad.name;
    EXPECT_EQ(tensor.status().code(), absl::StatusCode::kInvalidArgument) << bad.name;
    EXPECT_THAT(std::string(tensor.status().message()), HasSubstr(bad.says)) << bad.name;
    EXPECT_EQ(tensor.status().message().find('\n'), absl::string_view::npos) << bad.name;
  }
}

TEST(NpyTest, EveryTruncationOfAGoodFileIsRefused) {
  const std::string bytes = Npy(Dictionary("<f2", "(2, 1, 3)"), 12);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ParseNpy(absl::string_view(bytes).substr(0, length), DType::kFloat16).ok())
        << length;
  }
}

TEST(NpyTest, WhatIsWrittenIsRead) {
  const std::string path = testing::TempDir() + "kvmill_npy_test.npy";
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Tensor tensor;
    tensor.tokens = 5;
    tensor.heads = 2;
    tensor.head_dim = 64;
    tensor.dtype = dtype;
    for (std::uint16_t i = 0; i < 640; ++i) tensor.values.push_back(i);
    ASSERT_TRUE(WriteNpy(path, tensor).ok());
    const absl::StatusOr<Tensor> again = ReadNpy(path, dtype);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->values, tensor.values);
    EXPECT_EQ(again->ShapeString(), "[5, 2, 64]");
    // NumPy wants the values at a multiple of 64.
    EXPECT_EQ((ReadFile(path)->size() - 1280) % 64, 0u);
  }
  std::remove(path.c_str());
}

TEST(NpyTest, ErrorsNameTheFile) {
  EXPECT_THAT(std::string(ReadNpy("no/such/file.npy", DType::kFloat16).status().message()),
              HasSubstr("no/such/file.npy"));
}

}  // namespace
}  // namespace kvmill::cli
