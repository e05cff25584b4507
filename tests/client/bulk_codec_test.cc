// Bulk messages against the protobuf library: what one writes the other reads.
#include "client/bulk_codec.h"

#include <gmock/gmock.h>

#include <random>

#include "kvmill/v1/cache.pb.h"

namespace kvmill {
namespace {

// The bytes as a message that arrived in pieces of these sizes.
grpc::ByteBuffer InPieces(const std::string& bytes, std::size_t piece) {
  std::vector<grpc::Slice> slices;
  for (std::size_t i = 0; i < bytes.size(); i += piece) {
    slices.emplace_back(bytes.substr(i, piece));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Joined(const BulkMessage& message) {
  std::string bytes;
  for (const auto& piece : message.pieces()) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

v1::StoreChunk Head() {
  v1::StoreChunk head;
  head.set_sequence(300);
  head.set_key("key of the block");
  head.set_token_count(128);
  head.set_last(true);
  return head;
}

class BulkCodecTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(BulkCodecTest, ReadsWhatProtobufWroteInAnyPieces) {
  v1::StoreRequest request;
  *request.mutable_chunk() = Head();
  request.mutable_chunk()->set_inline_(std::string(1000, 'x') + "end");
  BulkMessage message;
  v1::StoreChunk head;
  ASSERT_TRUE(
      message.Parse(InPieces(request.SerializeAsString(), GetParam()), kChunkField, &head).ok());
  EXPECT_EQ(head.SerializeAsString(), Head().SerializeAsString());
  EXPECT_EQ(message.bulk_bytes(), 1003u);
  EXPECT_EQ(Joined(message), request.chunk().inline_());
}

TEST_P(BulkCodecTest, ProtobufReadsWhatItWrote) {
  const std::string bulk(GetParam() * 7, 'y');
  v1::StoreRequest request;
  ASSERT_TRUE(request.ParseFromString(EncodeBulkHead(Head(), kChunkField, bulk.size()) + bulk));
  EXPECT_EQ(request.chunk().inline_(), bulk);
  EXPECT_EQ(request.chunk().key(), Head().key());
  v1::FetchReply reply;
  v1::FetchReply part;
  part.set_block(7);
  part.add_page_bytes(70000);
  ASSERT_TRUE(reply.ParseFromString(EncodeBulkHead(part, 0, bulk.size()) + bulk));
  EXPECT_EQ(reply.pages(), bulk);
  EXPECT_EQ(reply.page_bytes(0), 70000u);
}

TEST_P(BulkCodecTest, RowsComeTogetherAcrossPieces) {
  v1::FetchReply reply;
  std::string rows;
  for (int i = 0; i < 20; ++i) rows.append(37, static_cast<char>('a' + i));
  reply.set_pages(rows);
  BulkMessage message;
  v1::FetchReply head;
  ASSERT_TRUE(message.Parse(InPieces(reply.SerializeAsString(), GetParam()), 0, &head).ok());
  const RowTable table(message.pieces(), 37, 20);
  EXPECT_LE(table.copy_bytes(), rows.size()) << "of pieces as small as a caller likes";
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(table.rows()[i]), 37),
              rows.substr(i * 37, 37));
  }
}

INSTANTIATE_TEST_SUITE_P(PieceBytes, BulkCodecTest, ::testing::Values(1, 2, 36, 37, 38, 1 << 20));

TEST(BulkCodecTest, WhatIsNoSuchMessageIsRefused) {
  v1::StoreRequest request;
  *request.mutable_chunk() = Head();
  request.mutable_chunk()->set_inline_("bulk");
  const std::string good = request.SerializeAsString();
  BulkMessage message;
  v1::StoreChunk head;
  // Bytes after the bulk field, another outer field, and every truncation.
  EXPECT_FALSE(message.Parse(InPieces(good + "\x08\x01", 64), kChunkField, &head).ok());
  EXPECT_FALSE(message.Parse(InPieces(good, 64), 1, &head).ok());
  for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
    EXPECT_FALSE(message.Parse(InPieces(good.substr(0, bytes), 5), kChunkField, &head).ok())
        << bytes;
  }
  v1::StoreChunk long_head = Head();
  long_head.set_parent(std::string(kBulkHeadBytesMax + 1, 'p'));
  EXPECT_FALSE(
      message.Parse(InPieces(EncodeBulkHead(long_head, kChunkField, 0), 4096), kChunkField, &head)
          .ok());
}

TEST(BulkCodecTest, AnyBytesAreReadOrRefused) {
  // Mutated messages: no crash, and what is accepted is consistent.
  v1::StoreRequest request;
  *request.mutable_chunk() = Head();
  request.mutable_chunk()->set_inline_("some bulk bytes");
  const std::string good = request.SerializeAsString();
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    BulkMessage message;
    v1::StoreChunk head;
    if (message.Parse(InPieces(bytes, 1 + random() % 20), kChunkField, &head).ok()) {
      EXPECT_EQ(Joined(message).size(), message.bulk_bytes());
    }
  }
}

}  // namespace
}  // namespace kvmill
