#include "storage/error_guard.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "storage/quantization_errors.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

OpenedNamespace Space(NamespaceId id, const std::string& name, std::uint8_t key_bits = 2,
                      std::uint8_t value_bits = 2) {
  OpenedNamespace space;
  space.id = id;
  space.name = name;
  space.spec.tenant = "default";
  space.spec.key_bits = key_bits;
  space.spec.value_bits = value_bits;
  return space;
}

void Observe(ErrorGuard& guard, const OpenedNamespace& space, int samples, double key_error,
             double value_error) {
  for (int i = 0; i < samples; ++i) guard.Observe(space, key_error, value_error);
}

constexpr ErrorGuard::Options kOptions = {.action = GuardAction::kFallBack,
                                          .key_error_max = 0.3,
                                          .value_error_max = 0.5,
                                          .window_samples = 8};

TEST(ErrorGuardTest, TheMeanOfAWholeWindowTripsAndNothingBefore) {
  ErrorGuard guard(kOptions);
  const OpenedNamespace space = Space(3, "chat");
  Observe(guard, space, 4, 0.1, 0.2);
  Observe(guard, space, 4, 0.1, 0.7);  // 0.45 on average.
  EXPECT_FALSE(guard.TripOf(3).has_value());
  Observe(guard, space, 7, 0.1, 0.9);
  EXPECT_FALSE(guard.TripOf(3).has_value()) << "seven are no window";
  EXPECT_TRUE(guard.CheckStore(space).ok());
  Observe(guard, space, 1, 0.1, 0.1);
  const auto trip = guard.TripOf(3);
  ASSERT_TRUE(trip.has_value());
  EXPECT_NEAR(trip->value_error, 0.8, 1e-9) << "of the second window alone";
  EXPECT_NEAR(trip->key_error, 0.1, 1e-9);
  EXPECT_TRUE(trip->value_above);
  EXPECT_FALSE(trip->key_above);
  EXPECT_EQ(trip->name, "chat");
}

TEST(ErrorGuardTest, WhatIsJustAtTheLimitPassesAndZeroIsNoLimit) {
  ErrorGuard guard(kOptions);
  Observe(guard, Space(0, "at"), 80, 0.25, 0.5);
  EXPECT_TRUE(guard.trips().empty());
  ErrorGuard::Options none = kOptions;
  none.key_error_max = 0;
  guard.SetOptions(none);
  Observe(guard, Space(0, "at"), 80, 50, 0.5);
  EXPECT_TRUE(guard.trips().empty());
}

TEST(ErrorGuardTest, ItTripsOnceAndOthersAreNotTouched) {
  ErrorGuard guard(kOptions);
  const OpenedNamespace bad = Space(7, "bad"), good = Space(2, "good"), worse = Space(1, "worse");
  for (int i = 0; i < 100; ++i) {
    Observe(guard, good, 1, 0.29, 0.4);
    Observe(guard, bad, 1, 0.4, 0.4);
  }
  Observe(guard, worse, 8, 0.9, 0.9);
  ASSERT_EQ(guard.trips().size(), 2u);
  EXPECT_EQ(guard.trips()[0].name, "bad");
  EXPECT_NEAR(guard.trips()[0].key_error, 0.4, 1e-9);
  EXPECT_EQ(guard.trips()[1].name, "worse");
  EXPECT_TRUE(guard.CheckStore(good).ok());
  EXPECT_EQ(guard.CheckStore(bad).code(), absl::StatusCode::kFailedPrecondition);
  Observe(guard, bad, 100, 0.01, 0.01);
  EXPECT_TRUE(guard.TripOf(7).has_value()) << "it stays";
}

TEST(ErrorGuardTest, ARefusalSaysWhatWasMeasuredTheLimitAndWhatToUse) {
  ErrorGuard guard(kOptions);
  const OpenedNamespace space = Space(0, "chat", 4, 2);
  Observe(guard, space, 8, 0.1, 0.625);
  const std::string message(guard.CheckStore(space).message());
  EXPECT_THAT(message, HasSubstr("k4v2 tiles of namespace \"chat\" lose 62.5 % of V (limit 50 %)"));
  EXPECT_THAT(message, HasSubstr("use \"chat~k4v4\" with key_bits 4, value_bits 4 instead"));
  EXPECT_THAT(message, Not(HasSubstr(" of K")));

  ErrorGuard::Options options = kOptions;
  options.action = GuardAction::kRefuse;
  guard.SetOptions(options);
  EXPECT_THAT(std::string(guard.CheckStore(space).message()), Not(HasSubstr("chat~k4v4")));
  options.action = GuardAction::kAlert;
  guard.SetOptions(options);
  EXPECT_TRUE(guard.CheckStore(space).ok());
  EXPECT_TRUE(guard.TripOf(0).has_value());
}

TEST(ErrorGuardTest, NewLimitsLetGoOfWhatIsWithinThem) {
  ErrorGuard guard(kOptions);
  const OpenedNamespace both = Space(0, "both"), value = Space(1, "value");
  Observe(guard, both, 8, 0.4, 0.58);
  Observe(guard, value, 8, 0.1, 0.55);
  ErrorGuard::Options options = kOptions;
  options.value_error_max = 0.6;
  guard.SetOptions(options);
  EXPECT_TRUE(guard.CheckStore(value).ok());
  EXPECT_FALSE(guard.TripOf(1).has_value());
  ASSERT_TRUE(guard.TripOf(0).has_value());
  EXPECT_TRUE(guard.TripOf(0)->key_above);
  EXPECT_FALSE(guard.TripOf(0)->value_above);
  options.key_error_max = 0.5;
  guard.SetOptions(options);
  EXPECT_TRUE(guard.CheckStore(both).ok());
  EXPECT_TRUE(guard.trips().empty());
  // It is measured from the start, and can trip again.
  Observe(guard, value, 7, 0.1, 0.9);
  EXPECT_TRUE(guard.trips().empty());
  Observe(guard, value, 1, 0.1, 0.9);
  EXPECT_EQ(guard.trips().size(), 1u);
  EXPECT_FALSE(guard.CheckStore(value).ok());
}

TEST(ErrorGuardTest, AFallBackRaisesTheHalvesThatLoseTooMuchUntilBlocksAreRaw) {
  const struct {
    const char* name;
    std::uint8_t key_bits, value_bits;
    bool key_above, value_above;
    const char* want_name;
    std::uint8_t want_key_bits, want_value_bits;
    bool want_raw;
  } cases[] = {
      {"chat", 2, 2, true, false, "chat~k4v2", 4, 2, false},
      {"chat", 2, 2, false, true, "chat~k2v4", 2, 4, false},
      {"chat", 2, 2, true, true, "chat~k4v4", 4, 4, false},
      {"chat", 4, 2, false, true, "chat~k4v4", 4, 4, false},
      {"chat", 4, 2, true, false, "chat~raw", 4, 4, true},
      {"chat", 2, 4, true, true, "chat~raw", 4, 4, true},
      {"chat~k4v2", 4, 2, false, true, "chat~k4v4", 4, 4, false},
      {"chat~k2v4", 2, 4, true, false, "chat~k4v4", 4, 4, false},
      {"chat~k4v4", 4, 4, false, true, "chat~raw", 4, 4, true},
      {"my~chat", 4, 4, true, false, "my~chat~raw", 4, 4, true},
      {"~k4v2", 4, 2, false, true, "~k4v2~k4v4", 4, 4, false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.want_name);
    NamespaceSpec spec = Space(0, c.name, c.key_bits, c.value_bits).spec;
    spec.sink_blocks = 1;
    const auto fallback = FallbackOf(c.name, spec, c.key_above, c.value_above);
    ASSERT_TRUE(fallback.has_value());
    EXPECT_EQ(fallback->name, c.want_name);
    spec.key_bits = c.want_key_bits;
    spec.value_bits = c.want_value_bits;
    spec.sink_blocks = c.want_raw ? kAllBlocksRaw : 1;
    EXPECT_EQ(DescribeDifference(fallback->spec, spec), "");
  }
}

TEST(ErrorGuardTest, ANameThatIsTooLongHasNoFallBack) {
  const NamespaceSpec spec = Space(0, "", 4, 2).spec;
  const std::string longest(kNamespaceNameBytesMax - 5, 'n');
  EXPECT_TRUE(FallbackOf(longest, spec, false, true).has_value());
  EXPECT_FALSE(FallbackOf(longest + "n", spec, false, true).has_value());
  ErrorGuard guard(kOptions);
  const OpenedNamespace space = Space(0, longest + "n", 4, 2);
  Observe(guard, space, 8, 0.1, 0.9);
  EXPECT_EQ(guard.CheckStore(space).code(), absl::StatusCode::kFailedPrecondition);
}

class GuardedStoreTest : public TieredStoreTest {
 protected:
  // Every head is a sample, four a block; 2-bit V of no structure loses half.
  void OpenGuarded(GuardAction action) {
    guard_.SetOptions(
        {.action = action, .key_error_max = 0.6, .value_error_max = 0.2, .window_samples = 4});
    options_.guard = &guard_;
    options_.errors = &errors_;
    Open(false);
  }
  ~GuardedStoreTest() override { store_.reset(); }  // Before them.

  ErrorGuard guard_{ErrorGuard::Options()};
  QuantizationErrors errors_{{.sample_interval = 1, .guard = &guard_}};
};

TEST_F(GuardedStoreTest, NewBlocksAreRefusedAndWhatIsThereStays) {
  OpenGuarded(GuardAction::kFallBack);
  NamespaceSpec other = Spec();
  other.value_bits = 4;
  const auto higher = store_->OpenNamespace("test~k4v4", other);
  ASSERT_TRUE(higher.ok()) << higher.status();
  // Begun before it trips: may be finished.
  auto begun = store_->BeginStore(Id(2), {.token_count = kTokens});
  ASSERT_TRUE(begun.ok()) << begun.status();
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(guard_.TripOf(space_).has_value());
  const absl::Status refused = Put(3);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("test~k4v4"));
  EXPECT_EQ(store_->stats().rejected_blocks, 1u);
  EXPECT_EQ(store_->stats().assembling_blocks, 1u) << "nothing is left of it";
  EXPECT_TRUE(absl::IsAlreadyExists(Put(1))) << "it is there";
  ASSERT_TRUE(Put(2).ok());
  EXPECT_TRUE(GetIs(1));
  EXPECT_TRUE(GetIs(2));
  EXPECT_EQ(store_->Lookup(space_, {Key(1), Key(2), Key(3)}).hit_blocks, 2u);
  // Where V has 4 bits.
  for (std::uint64_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(Put({higher->id, 0, Key(i)}, {.token_count = kTokens}, ValuesOf(i)).ok());
  }
  EXPECT_EQ(guard_.trips().size(), 1u);
}

TEST_F(GuardedStoreTest, AnAlertRefusesNothing) {
  OpenGuarded(GuardAction::kAlert);
  for (std::uint64_t i = 1; i <= 4; ++i) ASSERT_TRUE(Put(i).ok());
  EXPECT_EQ(guard_.trips().size(), 1u);
  for (std::uint64_t i = 1; i <= 4; ++i) EXPECT_TRUE(GetIs(i));
}

TEST_F(GuardedStoreTest, RawBlocksAreNoSamples) {
  OpenGuarded(GuardAction::kFallBack);
  NamespaceSpec raw = Spec();
  raw.key_bits = 4;
  raw.value_bits = 4;
  raw.sink_blocks = kAllBlocksRaw;
  const auto space = store_->OpenNamespace("test~raw", raw);
  ASSERT_TRUE(space.ok()) << space.status();
  guard_.SetOptions({.action = GuardAction::kFallBack,
                     .key_error_max = 1e-9,
                     .value_error_max = 1e-9,
                     .window_samples = 1});
  for (std::uint32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(
        Put({space->id, 0, Key(i)}, {.token_count = kTokens, .block_index = i}, ValuesOf(i)).ok());
  }
  EXPECT_TRUE(guard_.trips().empty());
}

}  // namespace
}  // namespace kvmill
