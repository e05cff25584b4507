// What nodes read of each other, and of etcd, against bytes that nobody should send: mutations of
// right answers, damaged and random ones. Each is refused with one clear error, or is a value
// within the bounds that its users rely on. Prints its seed, --seed=N repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cluster/peers.h"
#include "service/cluster/registration.h"
#include "service/cluster/ticket.h"
#include "service/peer_codec.h"
#include "service/ticket_codec.h"
#include "tests/integration/message_mutator.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

BlockKey Key(int i) { return *BlockKey::FromBytes(absl::StrCat("key of a block ", i)); }

class NodeRepliesTest : public ::testing::Test {
 protected:
  NodeRepliesTest() : mutator_(SeedArgument()) {
    for (const char* field : {"holder", "producer"}) mutator_.Know(field, std::string("node-a"));
    mutator_.Know("incarnation", std::string(16, 'i'));
    mutator_.Know("fingerprint", std::string(16, 'f'));
    mutator_.Know("secret", std::string(16, 's'));
    for (const char* field : {"key", "keys", "parent", "anchor", "tail_key"}) {
      for (int i = 0; i < 3; ++i) mutator_.Know(field, std::string(Key(i).view()));
    }
    for (const std::uint64_t value : {0, 1, 2, 3}) {
      for (const char* field : {"present", "count", "counts", "places", "block", "layer_count",
                                "finished", "state", "version", "group"}) {
        mutator_.Know(field, value);
      }
    }
    for (const std::uint64_t code : {0, 5, 10}) mutator_.Know("code", code);
  }

  // Bytes instead of the message.
  std::string InsteadOf(const google::protobuf::Message& right) {
    std::unique_ptr<google::protobuf::Message> message(right.New());
    message->CopyFrom(right);
    const std::uint64_t kind = mutator_.Below(10);
    if (kind == 0) return right.SerializeAsString();
    if (kind <= 6) {
      mutator_.Mutate(message.get(), 1 + static_cast<int>(mutator_.Below(3)));
    } else if (kind == 7) {
      message->Clear();
      mutator_.Fill(message.get());
    }
    const std::string bytes = message->SerializeAsString();
    return kind >= 8 || mutator_.OneIn(8) ? mutator_.Damage(bytes) : bytes;
  }

  // `check` says whether it believes what it gets, and looks at it if so.
  template <typename Message, typename Check>
  void Mutate(const Message& right, const Check& check) {
    int believed = 0;
    int refused = 0;
    EXPECT_TRUE(check(right));
    for (int i = 0; i < rounds_ && !HasFailure(); ++i) {
      Message message;
      if (!message.ParseFromString(InsteadOf(right))) {  // As gRPC says it: the call fails.
        ++refused;
        continue;
      }
      SCOPED_TRACE(message.ShortDebugString().substr(0, 1000));
      ++(check(message) ? believed : refused);
    }
    std::printf("%s: %d believed, %d refused\n", right.GetTypeName().c_str(), believed, refused);
    EXPECT_GT(believed, rounds_ / 20);
    EXPECT_GT(refused, rounds_ / 20);
  }
  template <typename T>
  static bool IsRefused(const absl::StatusOr<T>& value, absl::StatusCode code) {
    if (value.ok()) return false;
    EXPECT_EQ(value.status().code(), code) << value.status();
    EXPECT_FALSE(value.status().message().empty());
    EXPECT_LE(value.status().message().size(), 2048u);
    return true;
  }

  const int rounds_ = ShortOrLong(5'000, 1'000'000);
  MessageMutator mutator_;
};

TEST_F(NodeRepliesTest, WhatANodeHasOfRuns) {
  std::vector<RunQuery> queries(3);
  for (int i = 0; i < 3; ++i) {
    queries[static_cast<std::size_t>(i)].anchor = Key(i);
    for (int k = 0; k <= i; ++k) queries[static_cast<std::size_t>(i)].keys.push_back(Key(k));
  }
  v1::LocateReply right;
  std::vector<RunAnswer> right_answers(3);
  right_answers[0].present = 1;
  right_answers[1].present = 2;
  right_answers[1].pointers = {{"node-a", std::string(16, 'i'), 1, 2}};
  right_answers[2].pointers = {{"node-a", std::string(16, 'i'), 3, 0},
                               {"node-b", std::string(16, 'j'), 0, 7}};
  ToProto(right_answers, &right);
  Mutate(right, [&](const v1::LocateReply& reply) {
    const std::vector<RunAnswer> answers = FromProto(reply);
    if (!ValidAnswer(queries, answers)) return false;
    EXPECT_EQ(answers.size(), 3u);
    for (std::size_t i = 0; i < answers.size(); ++i) {
      EXPECT_EQ(answers[i].present >> queries[i].keys.size(), 0u) << "more than was asked for";
      EXPECT_LE(answers[i].pointers.size(), 16u);
      const v1::LocatedRun& said = reply.runs(static_cast<int>(i));
      if (static_cast<std::size_t>(said.pointers_size()) != answers[i].pointers.size()) {
        ADD_FAILURE() << "something was understood in part";
        return false;
      }
      for (std::size_t p = 0; p < answers[i].pointers.size(); ++p) {
        const Pointer& pointer = answers[i].pointers[p];
        EXPECT_TRUE(CheckName("holder", pointer.holder).ok()) << pointer.holder;
        EXPECT_EQ(pointer.incarnation.size(), 16u);
        EXPECT_EQ(pointer.blocks & pointer.perhaps, 0u);
        EXPECT_EQ((pointer.blocks | pointer.perhaps) >> queries[i].keys.size(), 0u);
        EXPECT_EQ(pointer.blocks, said.pointers(static_cast<int>(p)).blocks());
        EXPECT_EQ(pointer.perhaps, said.pointers(static_cast<int>(p)).perhaps());
      }
    }
    return true;
  });
}

TEST_F(NodeRepliesTest, WhatIsNewOfATicket) {
  TicketNews news;
  news.version = 3;
  news.fingerprint.fill(std::byte{'f'});
  for (int i = 0; i < 3; ++i) {
    TicketBlock& block = news.blocks.emplace_back();
    block.key = Key(i);
    if (i > 0) block.parent = Key(i - 1);
    block.layer_count = 3;
    block.token_count = 64;
    block.block_index = static_cast<std::uint32_t>(i);
  }
  news.changed = {{0, TicketBlockState::kSealed, LayerSet::First(3), 77},
                  {1, TicketBlockState::kOpen, LayerSet::First(1), 0},
                  {2, TicketBlockState::kFailed, LayerSet(), 0}};
  v1::AskTicketReply right;
  ToProto(news, &right);
  Mutate(right, [](const v1::AskTicketReply& reply) {
    const absl::StatusOr<TicketNews> read = FromProto(reply);
    if (reply.ended().code() != 0) {  // The ticket is over, as the producer says.
      EXPECT_FALSE(read.ok());
      return false;
    }
    if (IsRefused(read, absl::StatusCode::kDataLoss)) return false;
    v1::AskTicketReply again;
    ToProto(read, &again);
    const absl::StatusOr<TicketNews> same = FromProto(again);
    EXPECT_TRUE(same.ok()) << same.status();
    EXPECT_TRUE(same.ok() && same->version == read->version && same->blocks == read->blocks &&
                same->changed == read->changed && same->fingerprint == read->fingerprint)
        << "something was understood in part";
    for (int i = 0; i < reply.blocks_size() && same.ok(); ++i) {
      const TicketBlock& block = read->blocks.at(static_cast<std::size_t>(i));
      EXPECT_EQ(std::uint32_t{block.group}, reply.blocks(i).group());
      EXPECT_EQ(std::uint32_t{block.layer_count}, reply.blocks(i).layer_count());
    }
    if (!ValidNews(0, {}, *read)) return false;
    EXPECT_TRUE(!read->blocks.empty() && read->blocks.size() <= kTicketBlocksMax);
    for (const TicketBlock& block : read->blocks) {
      EXPECT_TRUE(!block.key.empty() && block.layer_count >= 1 && block.layer_count <= kLayersMax);
    }
    for (const TicketBlockNews& change : read->changed) {
      EXPECT_LT(change.block, read->blocks.size());
      EXPECT_LE(change.state, TicketBlockState::kFailed);
      EXPECT_LE(change.finished.end(), read->blocks[change.block].layer_count);
    }
    return true;
  });
}

TEST_F(NodeRepliesTest, Tickets) {
  TicketBearer bearer;
  bearer.secret.fill('s');
  bearer.producer = "node-a";
  bearer.incarnation = std::string(16, 'i');
  bearer.fingerprint.fill(std::byte{'f'});
  v1::TicketBearer right;
  ASSERT_TRUE(right.ParseFromString(Serialize(bearer)));
  const auto check = [](const std::string& bytes) {
    const absl::StatusOr<TicketBearer> read = ParseTicket(bytes);
    if (!read.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(read.status()) ||
                  absl::IsFailedPrecondition(read.status()))
          << read.status();
      EXPECT_FALSE(read.status().message().empty());
      EXPECT_LE(read.status().message().size(), 2048u + 4 * bytes.size());
      return false;
    }
    EXPECT_TRUE(CheckName("producer", read->producer).ok()) << read->producer;
    EXPECT_EQ(read->incarnation.size(), 16u);
    const std::string again = Serialize(*read);
    const absl::StatusOr<TicketBearer> same = ParseTicket(again);
    EXPECT_TRUE(same.ok() && Serialize(*same) == again);
    return true;
  };
  Mutate(right,
         [&](const v1::TicketBearer& message) { return check(message.SerializeAsString()); });
  // And bytes that engines may have spoiled.
  const std::string ticket = Serialize(bearer);
  for (int i = 0; i < rounds_ && !HasFailure(); ++i) check(mutator_.Damage(ticket));
}

TEST_F(NodeRepliesTest, RunsThatAreHeld) {
  const Fingerprint fingerprint = [] {
    Fingerprint f;
    f.fill(std::byte{'f'});
    return f;
  }();
  std::vector<HeldRun> runs(2);
  std::vector<RunList> asked;
  for (int i = 0; i < 2; ++i) {
    HeldRun& run = runs[static_cast<std::size_t>(i)];
    run.fingerprint = fingerprint;
    run.blocks.anchor = Key(i);
    run.anchor_hash = AnchorHash(fingerprint, Key(i));
    run.blocks.keys = {Key(i), Key(i + 1)};
    run.blocks.places = {0, 1};
    run.bytes = 1000;
    asked.push_back({run.anchor_hash});
    mutator_.Know("anchor_hash", run.anchor_hash);
  }
  v1::ListRunsReply right;
  ToProto(runs, &right);
  Mutate(right, [&](const v1::ListRunsReply& reply) {
    const absl::StatusOr<std::vector<HeldRun>> read = FromProto(reply);
    if (IsRefused(read, absl::StatusCode::kDataLoss) || !ValidRuns(asked, *read)) return false;
    std::set<std::uint64_t> seen;
    for (const HeldRun& run : *read) {
      EXPECT_TRUE(seen.insert(run.anchor_hash).second) << "twice";
      EXPECT_TRUE(run.anchor_hash == asked[0].anchor_hash ||
                  run.anchor_hash == asked[1].anchor_hash);
      EXPECT_TRUE(!run.blocks.keys.empty() && run.blocks.keys.size() <= kListKeysMax);
      EXPECT_EQ(run.blocks.keys.size(), run.blocks.places.size());
      for (const std::uint8_t place : run.blocks.places) EXPECT_LT(place, 32);
    }
    return true;
  });
}

TEST_F(NodeRepliesTest, RunsThatAHomeTook) {
  v1::HandOverReply right;
  for (const std::uint32_t count : {0, 1, 32}) right.add_counts(count);
  Mutate(right, [](const v1::HandOverReply& reply) {
    const absl::StatusOr<std::vector<std::uint8_t>> read = FromProto(reply);
    if (IsRefused(read, absl::StatusCode::kDataLoss)) return false;
    EXPECT_EQ(read->size(), static_cast<std::size_t>(reply.counts_size()));
    for (const std::uint8_t count : *read) EXPECT_LE(count, 32);
    return true;
  });
}

// The value of a member in etcd: words, with fields exchanged, repeated, left out, and bytes
// spoiled.
TEST_F(NodeRepliesTest, MembersInEtcd) {
  Registration registration;
  registration.member = {.id = "node-a",
                         .incarnation = std::string(16, 'i'),
                         .address = "[2001:db8::7]:7600",
                         .zone = "eu-1a",
                         .capacity_bytes = 68719476736,
                         .admin_address = "[2001:db8::7]:7601"};
  registration.holder = std::string(16, 'h');
  const std::string right = *EncodeRegistration(registration);
  std::vector<std::string> words;
  for (std::size_t at = 0; at < right.size();) {
    const std::size_t end = std::min(right.find(' ', at), right.size());
    words.push_back(right.substr(at, end - at));
    at = end + 1;
  }
  int believed = 0;
  int refused = 0;
  for (int i = 0; i < rounds_ && !HasFailure(); ++i) {
    std::vector<std::string> changed = words;
    for (std::uint64_t n = mutator_.Below(3); n > 0; --n) {
      std::string& word = changed[mutator_.Below(changed.size())];
      switch (mutator_.Below(6)) {
        case 0:
          word = changed[mutator_.Below(changed.size())];
          break;
        case 1:
          word.clear();
          break;
        case 2:
          word += std::string(mutator_.Below(400), 'x');
          break;
        case 3:
          std::swap(word, changed[1 + mutator_.Below(changed.size() - 1)]);
          break;
        case 4:
          changed.push_back("later=" + std::string(mutator_.Below(20), '='));
          break;
        default:
          word = mutator_.Damage(word);
      }
    }
    std::string value;
    for (const std::string& word : changed) {
      absl::StrAppend(&value, value.empty() ? "" : " ", word);
    }
    if (mutator_.OneIn(3)) value = mutator_.Damage(value);
    SCOPED_TRACE(value);
    const absl::StatusOr<Registration> read = DecodeRegistration(value);
    if (!read.ok()) {
      ++refused;
      EXPECT_TRUE(absl::IsDataLoss(read.status()) || absl::IsUnimplemented(read.status()))
          << read.status();
      EXPECT_FALSE(read.status().message().empty());
      continue;
    }
    ++believed;
    const Member& member = read->member;
    EXPECT_TRUE(CheckName("id", member.id).ok());
    EXPECT_TRUE(member.zone.empty() || CheckName("zone", member.zone).ok());
    EXPECT_EQ(member.incarnation.size(), 16u);
    EXPECT_TRUE(!member.address.empty() && member.address.size() <= kAddressBytesMax);
    EXPECT_LE(member.admin_address.size(), kAddressBytesMax);
    EXPECT_GE(member.capacity_bytes, 1u);
    EXPECT_TRUE(read->holder.empty() || read->holder.size() == kHolderBytes);
    const auto again = EncodeRegistration(*read);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*DecodeRegistration(*again), *read);
  }
  std::printf("members: %d believed, %d refused\n", believed, refused);
  EXPECT_GT(believed, rounds_ / 20);
  EXPECT_GT(refused, rounds_ / 20);
}

}  // namespace
}  // namespace kvmill::testing
