#include "client/request_context.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/request_metadata.h"

namespace kvmill {
namespace {

constexpr const char* kTrace = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr const char* kSpan = "00f067aa0ba902b7";
const std::string kGood = absl::StrCat("00-", kTrace, "-", kSpan, "-01");

TEST(RequestContextTest, TraceparentsAreReadAsTheRecommendationSays) {
  const std::string rest = absl::StrCat("-", kTrace, "-", kSpan, "-01");
  const struct {
    std::string text;
    bool right;
  } cases[] = {
      {kGood, true},
      {absl::StrCat("00-", kTrace, "-", kSpan, "-00"), true},
      {absl::StrCat("00-", kTrace, "-", kSpan, "-ff"), true},
      {"01" + rest, true},
      {"cc" + rest + "-what-the-future-will-be-like", true},
      {"cc" + rest + "-", true},
      {"", false},
      {"00", false},
      {"ff" + rest, false},
      {"0G" + rest, false},
      {"0A" + rest, false},
      {kGood + "-", false},
      {kGood + "-more", false},
      {kGood + " ", false},
      {"cc" + rest + ".what", false},
      {"cc" + rest + "x", false},
      {kGood.substr(0, 54), false},
      {absl::StrCat("00-00000000000000000000000000000000-", kSpan, "-01"), false},
      {absl::StrCat("00-", kTrace, "-0000000000000000-01"), false},
      {absl::StrCat("00-4BF92F3577B34DA6A3CE929D0E0E4736-", kSpan, "-01"), false},
      {absl::StrCat("00-", kTrace, "-00f067aa0ba902bz-01"), false},
      {absl::StrCat("00-", kTrace, "-", kSpan, "-0x"), false},
      {absl::StrCat("00-", kTrace, "-", kSpan, "-0A"), false},
      {absl::StrCat("00_", kTrace, "-", kSpan, "-01"), false},
      {absl::StrCat("00-", kTrace, "_", kSpan, "-01"), false},
      {absl::StrCat("00-", kTrace, "-", kSpan, "_01"), false},
  };
  for (const auto& c : cases) EXPECT_EQ(IsTraceparent(c.text), c.right) << c.text;
}

TEST(RequestContextTest, TracestatesAreListsOfKeysAndValues) {
  std::string many = "k0=v";
  for (int i = 1; i < 32; ++i) absl::StrAppend(&many, ",k", i, "=v");
  const struct {
    std::string text;
    bool right;
  } cases[] = {
      {"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", true},
      {"a=1", true},
      {"a=1 , \tb=2", true},
      {"a=1,,b=2", true},
      {"fw529a3039@dt=FfAB,0tenant@system=v", true},
      {"a_-*/9=~!\"#", true},
      {many, true},
      {many + ",k32=v", false},
      {"", false},
      {",", false},
      {"a", false},
      {"a=", false},
      {"=1", false},
      {"a=1,a=2", false},
      {"A=1", false},
      {"0a=1", false},
      {"a@=1", false},
      {"@a=1", false},
      {"a@0b=1", false},
      {"a@b@c=1", false},
      {"a=b=c", false},
      {"a b=1", false},
      {"a=\x01", false},
      {"a=\xc3\xa9", false},
      {absl::StrCat("a=", std::string(256, 'v')), true},
      {absl::StrCat("a=", std::string(257, 'v')), false},
      {absl::StrCat(std::string(256, 'k'), "=v"), true},
      {absl::StrCat(std::string(257, 'k'), "=v"), false},
      {absl::StrCat("a@", std::string(14, 's'), "=v"), true},
      {absl::StrCat("a@", std::string(15, 's'), "=v"), false},
      {absl::StrCat("a=", std::string(254, 'v'), ",b=", std::string(253, 'v')), true},
      {absl::StrCat("a=", std::string(254, 'v'), ",b=", std::string(254, 'v')), false},
  };
  for (const auto& c : cases) EXPECT_EQ(IsTracestate(c.text), c.right) << c.text;
}

TEST(RequestContextTest, RequestIdsAreShortAndPlain) {
  for (const char* id : {"1", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "a.b_c:d/e+f=@Z9"}) {
    EXPECT_TRUE(IsRequestId(id)) << id;
  }
  EXPECT_TRUE(IsRequestId(std::string(64, 'x')));
  EXPECT_FALSE(IsRequestId(std::string(65, 'x')));
  for (const char* id : {"", "a b", "a\nb", "a\"b", "\xc3\xa9", "a,b", "a;b", "<a>"}) {
    EXPECT_FALSE(IsRequestId(id)) << id;
  }
}

TEST(RequestContextTest, WhatIsWrongIsLeftOutAndNothingElse) {
  RequestContext right = RightPartsOf({"r", kGood, "a=1"});
  EXPECT_EQ(right.request_id, "r");
  EXPECT_EQ(right.traceparent, kGood);
  EXPECT_EQ(right.tracestate, "a=1");
  EXPECT_EQ(right.trace_id(), kTrace);
  EXPECT_EQ(right.span_id(), kSpan);
  right = RightPartsOf({"r r", kGood, "a"});
  EXPECT_EQ(right.request_id, "");
  EXPECT_EQ(right.traceparent, kGood);
  EXPECT_EQ(right.tracestate, "");
  right = RightPartsOf({"r", "nonsense", "a=1"});
  EXPECT_EQ(right.request_id, "r");
  EXPECT_EQ(right.traceparent, "");
  EXPECT_EQ(right.tracestate, "") << "it belongs to a traceparent";
  EXPECT_EQ(right.trace_id(), "");
  // Of a later version what version 00 knows.
  for (const auto& [flags, ours] :
       {std::pair("01", "01"), {"fe", "00"}, {"0b", "01"}, {"0a", "00"}}) {
    EXPECT_EQ(RightPartsOf({"", absl::StrCat("cc-", kTrace, "-", kSpan, "-", flags, "-x"), ""})
                  .traceparent,
              absl::StrCat("00-", kTrace, "-", kSpan, "-", ours));
  }
}

TEST(RequestContextTest, ScopesAreOfTheirThreadAndNest) {
  EXPECT_EQ(CurrentRequest(), nullptr);
  {
    const RequestScope outer({.request_id = "outer", .traceparent = kGood});
    EXPECT_EQ(CurrentRequest()->request_id, "outer");
    std::thread([] { EXPECT_EQ(CurrentRequest(), nullptr); }).join();
    {
      const RequestScope inner({.request_id = "in ner"});
      EXPECT_TRUE(CurrentRequest()->empty());
      const RequestScope none(RequestPtr{});
      EXPECT_EQ(CurrentRequest(), nullptr);
    }
    EXPECT_EQ(CurrentRequest()->traceparent, kGood);
  }
  EXPECT_EQ(CurrentRequest(), nullptr);
}

TEST(RequestContextTest, AHeaderOfTheDataPlaneTakesWhatItHasRoomFor) {
  const RequestPtr request = std::make_shared<const RequestContext>(RequestContext{
      .request_id = "id", .traceparent = kGood, .tracestate = "a=" + std::string(250, 'x')});
  EXPECT_EQ(RequestOf(v1::DataRequest()), nullptr);
  v1::DataRequest header;
  AddRequest(nullptr, &header);
  EXPECT_FALSE(header.has_trace());
  const std::pair<std::size_t, int> cases[] = {{1000, 3}, {330, 3}, {200, 2}, {20, 0}};
  for (const auto& [room, what] : cases) {
    header.Clear();
    header.mutable_fetch()->add_keys(std::string(kCallHeaderBytesMax - room, 'k'));
    const std::size_t before = header.ByteSizeLong();
    AddRequest(request, &header);
    EXPECT_LE(header.ByteSizeLong(), kCallHeaderBytesMax);
    EXPECT_LE(header.ByteSizeLong() - before, RequestBytes(request));
    const RequestPtr read = RequestOf(header);
    ASSERT_EQ(read != nullptr, what > 0) << room;
    if (read == nullptr) continue;
    EXPECT_EQ(read->request_id, "id");
    EXPECT_EQ(read->traceparent, kGood);
    EXPECT_EQ(read->tracestate, what == 3 ? request->tracestate : "") << room;
  }
  // What is wrong is left out.
  header.mutable_trace()->set_request_id("a b");
  header.mutable_trace()->set_traceparent(kGood + "x");
  EXPECT_EQ(RequestOf(header), nullptr);
}

}  // namespace
}  // namespace kvmill
