// What client/transport/transport.h promises, over UCX and in memory.
#include <csignal>

#include "tests/client/transport/transport_fixture.h"

namespace kvmill::testing {
namespace {

class TransportTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  TransportTest() : pair(GetParam()) {}
  void TearDown() override { pair.ExpectIdle(); }
  Pair pair;
};

INSTANTIATE_TEST_SUITE_P(All, TransportTest,
                         ::testing::Values(TransportKind{true, true}, TransportKind{true, false},
                                           TransportKind{false, true}, TransportKind{false, false}),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(TransportTest, PayloadsOfEverySizeArrive) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  for (const std::size_t bytes :
       {0, 1, 7, 4096, 65535, 65536, 65537, 131072, 262143, 524288, 524289, 1 << 20, 5'000'003}) {
    const std::vector<std::byte> data = RandomData(bytes, bytes + 1);
    const CallResultPtr result = pair.Start(connection, "echo", data);
    ASSERT_TRUE(pair.Wait(result).ok()) << bytes << ": " << result->status();
    EXPECT_EQ(result->done.Get()->payload_bytes, bytes);
    EXPECT_EQ(ToText(result->done.Get()->header), "echo");
    EXPECT_TRUE(result->destination == data) << bytes;
  }
}

// Gathers from spans of random sizes, empty ones too, and scatters into others.
TEST_P(TransportTest, SpansOnBothSidesAreIndependent) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round) {
    const std::size_t bytes = 1 + random() % (round % 2 == 0 ? 2'000'000 : 100'000);
    const std::size_t span_max = round % 3 == 0 ? 1000 + bytes / 100 : 300'000;
    const std::vector<std::byte> data = RandomData(bytes, random());
    std::vector<std::byte> out(bytes);
    const auto cut = [&](auto span) {
      std::vector<decltype(span)> spans;
      while (!span.empty()) {
        const std::size_t take = std::min<std::size_t>(span.size(), random() % span_max);
        spans.push_back(span.subspan(0, take));
        span.remove_prefix(take);
      }
      return spans;
    };
    auto result = std::make_shared<CallResult>();
    Call call;
    call.payload = cut(absl::MakeConstSpan(data));
    call.timeout_nanos = 40 * kSecond;
    call.place = [&](const ResponseHead& head, DestinationSpans* spans) {
      EXPECT_EQ(head.payload_bytes, bytes);
      *spans = cut(absl::MakeSpan(out));
      return absl::OkStatus();
    };
    call.done = [result](absl::StatusOr<Response> r) { result->done.Set(std::move(r)); };
    connection->Start(std::move(call));
    ASSERT_TRUE(pair.Wait(result).ok()) << result->status();
    EXPECT_TRUE(out == data) << "round " << round << ", " << bytes << " bytes";
  }
}

TEST_P(TransportTest, ShortSpansAreGatheredIntoSegmentsThatThePeerTakes) {
  for (const bool small_client : {false, true}) {
    TransportOptions& small = small_client ? pair.client_options : pair.server_options;
    const TransportOptions usual = small;
    small.limits.segment_bytes_max = 64 << 10;
    pair.Make();
    const ConnectionPtr connection = pair.Connect();
    const std::vector<std::byte> data = RandomData(300'000, 8);
    SourceSpans spans;
    for (std::size_t at = 0; at < data.size(); at += 1000) {
      spans.push_back(absl::MakeConstSpan(data).subspan(at, 1000));
    }
    pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
      if (call->payload_bytes() != 0) return ScriptedHandler::Echo(std::move(call));
      call->Respond({.payload = spans});
    });
    std::vector<std::byte> out(data.size());
    for (const SourceSpans& payload : {spans, SourceSpans()}) {
      auto result = std::make_shared<CallResult>();
      Call call;
      call.payload = payload;
      call.timeout_nanos = 40 * kSecond;
      call.place = [&](const ResponseHead& head, DestinationSpans* where) {
        EXPECT_EQ(head.payload_bytes, out.size());
        *where = {absl::MakeSpan(out)};
        return absl::OkStatus();
      };
      call.done = [result](absl::StatusOr<Response> r) { result->done.Set(std::move(r)); };
      connection->Start(std::move(call));
      ASSERT_TRUE(pair.Wait(result).ok()) << result->status();
      EXPECT_TRUE(out == data);
      out.assign(out.size(), std::byte{});
    }
    connection->Close();
    pair.ExpectIdle();
    pair.client.reset();
    pair.server.reset();
    small = usual;
  }
}

TEST_P(TransportTest, HeadersGoUpToTheirLimit) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  for (const std::size_t bytes : {std::size_t{0}, kCallHeaderBytesMax}) {
    const std::string header(bytes, 'h');
    const CallResultPtr result = pair.Start(connection, header);
    ASSERT_TRUE(pair.Wait(result).ok()) << result->status();
    EXPECT_EQ(ToText(result->done.Get()->header), header);
  }
  EXPECT_EQ(pair.Wait(pair.Start(connection, std::string(kCallHeaderBytesMax + 1, 'h'))).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pair.Wait(pair.Start(connection, "x", {}, 0)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(TransportTest, BothSidesStartCalls) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.connections().size() == 1; }));
  const ConnectionPtr back = pair.server_handler.connections()[0];
  const std::vector<std::byte> data = RandomData(300'000, 3);
  const CallResultPtr there = pair.Start(connection, "there", data);
  const CallResultPtr here = pair.Start(back, "here", data);
  EXPECT_TRUE(pair.Wait(there).ok());
  EXPECT_TRUE(pair.Wait(here).ok());
  EXPECT_TRUE(here->destination == data);
  EXPECT_EQ(pair.client_handler.calls(), 1);
}

TEST_P(TransportTest, ManySmallCallsAndAFewHugeOnesAtOnce) {
  pair.server_options.limits.calls_max = 16;
  pair.client_options.limits.waiting_calls_max = 5000;
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> small = RandomData(1000, 1);
  const std::vector<std::byte> huge = RandomData(8'000'000, 2);
  std::vector<CallResultPtr> results;
  for (int i = 0; i < 2000; ++i) {
    results.push_back(pair.Start(connection, "n", i % 500 == 250 ? huge : small));
  }
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(pair.Wait(results[i]).ok()) << i << ": " << results[i]->status();
    ASSERT_TRUE(results[i]->destination == (i % 500 == 250 ? huge : small)) << i;
  }
  EXPECT_EQ(pair.server_handler.calls(), 2000);
}

TEST_P(TransportTest, CallsBeyondThePeersWindowWaitAndBeyondTheQueueFail) {
  pair.server_options.limits.calls_max = 4;
  pair.client_options.limits.waiting_calls_max = 3;
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  Mutex mu;
  std::vector<std::unique_ptr<IncomingCall>> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    const MutexLock lock(mu);
    kept.push_back(std::move(call));
  });
  const auto kept_count = [&] {
    const MutexLock lock(mu);
    return kept.size();
  };
  std::vector<CallResultPtr> results;
  for (int i = 0; i < 8; ++i) results.push_back(pair.Start(connection, "k"));
  EXPECT_EQ(pair.Wait(results[7]).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(pair.WaitFor([&] { return kept_count() == 4; }));
  pair.Pass(50 * kMilli);
  EXPECT_EQ(kept_count(), 4u);
  EXPECT_EQ(pair.client->stats().calls_started, 7u);
  for (int round = 0; round < 7; ++round) {
    ASSERT_TRUE(pair.WaitFor([&] { return kept_count() > 0; }));
    std::unique_ptr<IncomingCall> call;
    {
      const MutexLock lock(mu);
      call = std::move(kept.back());
      kept.pop_back();
    }
    call->Respond({});
  }
  for (int i = 0; i < 7; ++i) EXPECT_TRUE(pair.Wait(results[i]).ok()) << i;
}

TEST_P(TransportTest, RequestBytesAreAWindowToo) {
  pair.server_options.limits.request_bytes_max = 100'000;
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  Mutex mu;
  std::vector<std::unique_ptr<IncomingCall>> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    const MutexLock lock(mu);
    kept.push_back(std::move(call));
  });
  const std::vector<std::byte> data = RandomData(60'000, 1);
  const CallResultPtr first = pair.Start(connection, "1", data);
  const CallResultPtr second = pair.Start(connection, "2", data);
  const std::vector<std::byte> too_long = RandomData(100'001, 1);
  EXPECT_EQ(pair.Wait(pair.Start(connection, "3", too_long)).code(),
            absl::StatusCode::kInvalidArgument);
  const auto kept_count = [&] {
    const MutexLock lock(mu);
    return kept.size();
  };
  ASSERT_TRUE(pair.WaitFor([&] { return kept_count() > 0; }));
  pair.Pass(50 * kMilli);
  EXPECT_EQ(kept_count(), 1u) << "the second has no room beside it";
  const auto answer = [&](std::size_t index) {
    std::unique_ptr<IncomingCall> call;
    {
      const MutexLock lock(mu);
      call = std::move(kept[index]);
    }
    ScriptedHandler::Echo(std::move(call));
  };
  answer(0);
  EXPECT_TRUE(pair.Wait(first).ok());
  EXPECT_TRUE(first->destination == data);
  ASSERT_TRUE(pair.WaitFor([&] { return kept_count() == 2; }));
  answer(1);
  EXPECT_TRUE(pair.Wait(second).ok());
}

TEST_P(TransportTest, FailuresOfTheHandlerTravel) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> data = RandomData(3'000'000, 1);
  Box<absl::Status> replied;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    call->Respond({.status = absl::NotFoundError("no such page"),
                   .done = [&](absl::Status status) { replied.Set(status); }});
  });
  // Answered before its payload was wanted: the rest of it never travels.
  const absl::Status status = pair.Wait(pair.Start(connection, "pull", data));
  EXPECT_EQ(status, absl::NotFoundError("no such page"));
  EXPECT_TRUE(pair.WaitFor([&] { return replied.has(); }));
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) { call.reset(); });
  EXPECT_EQ(pair.Wait(pair.Start(connection, "drop", data)).code(), absl::StatusCode::kInternal);
  pair.server_handler.set_on_call(nullptr);
  EXPECT_TRUE(pair.Wait(pair.Start(connection, "echo", data)).ok());
}

TEST_P(TransportTest, ResponsesNeedAPlaceOfTheirSize) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> data = RandomData(200'000, 1);
  std::vector<std::byte> out(100);
  for (const int variant : {0, 1, 2}) {
    auto result = std::make_shared<CallResult>();
    Call call;
    call.payload = {data};
    call.timeout_nanos = 40 * kSecond;
    if (variant == 1) {
      call.place = [&](const ResponseHead&, DestinationSpans* spans) {
        spans->push_back(absl::MakeSpan(out));
        return absl::OkStatus();
      };
    } else if (variant == 2) {
      call.place = [](const ResponseHead&, DestinationSpans*) {
        return absl::ResourceExhaustedError("no buffer");
      };
    }
    call.done = [result](absl::StatusOr<Response> r) { result->done.Set(std::move(r)); };
    connection->Start(std::move(call));
    const absl::StatusCode want[] = {absl::StatusCode::kFailedPrecondition,
                                     absl::StatusCode::kInvalidArgument,
                                     absl::StatusCode::kResourceExhausted};
    EXPECT_EQ(pair.Wait(result).code(), want[variant]);
  }
  // The connection is none the worse.
  EXPECT_TRUE(pair.Wait(pair.Start(connection, "echo", data)).ok());
}

TEST_P(TransportTest, DeadlinesEndCallsOnBothSides) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  Mutex mu;
  std::unique_ptr<IncomingCall> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    const MutexLock lock(mu);
    kept = std::move(call);
  });
  // On a machine that stands still a deadline may come before the call was sent.
  for (std::int64_t timeout_nanos = 50 * kMilli; pair.server_handler.calls() == 0;
       timeout_nanos *= 2) {
    ASSERT_LT(timeout_nanos, 20 * kSecond) << "no call ever arrived";
    EXPECT_EQ(pair.Wait(pair.Start(connection, "slow", {}, timeout_nanos)).code(),
              absl::StatusCode::kDeadlineExceeded);
    pair.WaitFor([&] { return pair.server_handler.calls() > 0; }, kSecond);
  }
  const auto cancelled = [&] {
    const MutexLock lock(mu);
    return kept != nullptr && kept->cancelled();
  };
  EXPECT_TRUE(pair.WaitFor(cancelled));
  // Its place is taken until it is answered.
  EXPECT_TRUE(pair.WaitFor([&] { return pair.server->stats().calls_served == 1; }));
  Box<absl::Status> replied;
  kept->Respond({.done = [&](absl::Status status) { replied.Set(status); }});
  ASSERT_TRUE(pair.WaitFor([&] { return replied.has(); }));
  EXPECT_EQ(replied.Get().code(), absl::StatusCode::kCancelled);
  pair.server_handler.set_on_call(nullptr);
  EXPECT_TRUE(pair.Wait(pair.Start(connection, "echo")).ok());
}

TEST_P(TransportTest, CancelledCallsCompleteOnce) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> data = RandomData(2'000'000, 1);
  int cancelled = 0;
  for (int i = 0; i < 60; ++i) {
    const CallResultPtr result = pair.Start(connection, "echo", data);
    if (i % 3 != 0) pair.Pass((i % 20) * 100'000);
    connection->Cancel(result->id);
    connection->Cancel(result->id);
    const absl::Status status = pair.Wait(result);
    if (absl::IsCancelled(status)) {
      ++cancelled;
    } else {
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(result->destination == data);
    }
  }
  EXPECT_GT(cancelled, 0);
  const CallResultPtr after = pair.Start(connection, "echo", data);
  EXPECT_TRUE(pair.Wait(after).ok()) << after->status();
  EXPECT_TRUE(after->destination == data);
}

TEST_P(TransportTest, CloseEndsCallsOnBothSides) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  Mutex mu;
  std::vector<std::unique_ptr<IncomingCall>> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    const MutexLock lock(mu);
    kept.push_back(std::move(call));
  });
  const CallResultPtr result = pair.Start(connection, "keep");
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.calls() == 1; }));
  connection->Close();
  connection->Close();
  EXPECT_EQ(pair.Wait(result).code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(pair.WaitFor([&] { return pair.client_closed.has(); }));
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.closed().size() == 1; }));
  EXPECT_EQ(pair.server_handler.closed()[0],
            absl::UnavailableError("the peer closed the connection"));
  EXPECT_TRUE(kept[0]->cancelled());
  kept.clear();
  EXPECT_EQ(pair.Wait(pair.Start(connection, "late")).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.client_closed.times(), 1);
  EXPECT_EQ(pair.client->stats().connections, 0u);
  EXPECT_EQ(pair.server->stats().connections, 0u);
}

TEST_P(TransportTest, DestroyingATransportCompletesEverything) {
  for (const bool client_side : {true, false}) {
    Pair both(GetParam());
    both.Make();
    const ConnectionPtr connection = both.Connect();
    const std::vector<std::byte> data = RandomData(3'000'000, 1);
    std::vector<CallResultPtr> results;
    for (int i = 0; i < 20; ++i) results.push_back(both.Start(connection, "echo", data));
    both.Pass(kMilli);
    (client_side ? both.client : both.server).reset();
    for (const CallResultPtr& result : results) {
      const absl::Status status = both.Wait(result);
      EXPECT_TRUE(status.ok() || status.code() == (client_side ? absl::StatusCode::kCancelled
                                                               : absl::StatusCode::kUnavailable))
          << status;
    }
    both.ExpectIdle();
  }
}

TEST_P(TransportTest, TasksRunInTheirTime) {
  pair.Make();
  Box<std::int64_t> ran;
  const std::int64_t due = pair.client->NowNanos() + 20 * kMilli;
  pair.client->RunAt(due, [&] { ran.Set(pair.client->NowNanos()); });
  ASSERT_TRUE(pair.WaitFor([&] { return ran.has(); }));
  EXPECT_GE(ran.Get(), due);
}

void OwnHandler(int /*signal*/) {}

// UCX would print a backtrace of its own and ignore the handlers that the program installs.
TEST_P(TransportTest, CrashesStayTheProgramsBusiness) {
  pair.Make();
  struct sigaction action {};
  ASSERT_EQ(sigaction(SIGBUS, nullptr, &action), 0);
  EXPECT_EQ(action.sa_handler, SIG_DFL);
  const auto before = signal(SIGBUS, OwnHandler);
  ASSERT_EQ(sigaction(SIGBUS, nullptr, &action), 0);
  EXPECT_EQ(action.sa_handler, &OwnHandler);
  signal(SIGBUS, before);
}

TEST_P(TransportTest, BadOptionsAreRefused) {
  pair.client_options.limits.segment_bytes_max = 1000;
  const auto make = [&]() -> absl::Status {
    if (GetParam().ucx) return MakeUcxTransport(pair.client_options, {}).status();
    return pair.network()->MakeTransport(pair.client_options, "").status();
  };
  EXPECT_EQ(make().code(), absl::StatusCode::kInvalidArgument);
  pair.client_options.limits = {};
  pair.client_options.limits.calls_max = 0;
  EXPECT_EQ(make().code(), absl::StatusCode::kInvalidArgument);
  pair.client_options.limits = {};
  pair.client_options.version_min = 2;
  EXPECT_EQ(make().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill::testing
