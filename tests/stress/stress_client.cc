// One process of clients of the stress test: does what a client can do, at random, and checks every
// byte that it sees against the model, until SIGTERM (or something harder) ends it.
//   stress_client --unix PATH --tcp HOST:PORT|none --name NAME --seed N --threads N
//   stress_client ... --other-unix PATH         Of another node of the cluster: it is used, too.
//   stress_client ... --reuse-pages-unasked 1   A fault, to see that it is found.
//   stress_client --unix PATH --clear
//   stress_client --unix PATH --race     Races, to see whether ThreadSanitizer sees it.
// NAME is of this process alone. Says "running", at the end "done " and what it did as JSON;
// "WRONG:
// ..." and exit code 70 when it saw what must not be.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "client/client.h"
#include "tests/stress/stress_model.h"
#include "tests/stress/stress_worker.h"

namespace kvmill::stress {
namespace {

int Clear(const std::string& unix_path) {
  const auto client = Client::Create({.address = "unix:" + unix_path});
  for (const Space space : {Space::kTiles, Space::kRaw}) {
    const auto ns = (*client)->OpenNamespace(NameOf(space), SpecOf(space));
    if (!ns.ok()) Wrong("clear: " + ns.status().ToString());
    const auto cleared = (*client)->Clear(*ns);
    if (!cleared.ok()) Wrong("clear: " + cleared.status().ToString());
  }
  return 0;
}

// Between the caller of an asynchronous call and its completion, which gRPC's queue hands to
// another thread: the kind of fault that the rules of tsan_grpc.cc must not hide.
int Race(const std::string& unix_path) {
  const auto client = Client::Create({.address = "unix:" + unix_path});
  int unguarded = 0;
  std::promise<void> done;
  (*client)->StatAsync({}, [&](const absl::StatusOr<ServerStat>&) {
    ++unguarded;
    done.set_value();
  });
  ++unguarded;
  done.get_future().wait();
  return unguarded == 2 ? 0 : 1;
}

int Main(const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    if (arguments[i].rfind("--", 0) != 0) return 2;
    options[arguments[i].substr(2)] = i + 1 < arguments.size() ? arguments[i + 1] : "";
  }
  if (options.contains("clear")) return Clear(options["unix"]);
  if (options.contains("race")) return Race(options["unix"]);
  std::uint64_t seed = 0;
  std::uint32_t threads = 0;
  if (!absl::SimpleAtoi(options["seed"], &seed) || !absl::SimpleAtoi(options["threads"], &threads))
    return 2;

  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // Threads inherit it.

  const Model model(geteuid());
  std::map<std::string, std::uint64_t> did;
  {
    const std::unique_ptr<Clients> clients =
        Clients::Connect({.unix_path = options["unix"],
                          .tcp = options["tcp"] == "none" ? "" : options["tcp"],
                          .other_unix_path = options["other-unix"]});
    std::atomic<bool> stop{false};
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::thread> running;
    for (std::uint32_t t = 0; t < threads; ++t) {
      workers.push_back(std::make_unique<Worker>(model, *clients, Mix(seed ^ Mix(t)),
                                                 options["name"] + "." + std::to_string(t), t,
                                                 options.contains("reuse-pages-unasked")));
      running.emplace_back([&stop, worker = workers.back().get()] {
        while (!stop.load(std::memory_order_relaxed)) worker->Step();
      });
    }
    std::printf("running\n");
    std::fflush(stdout);
    int signal = 0;
    sigwait(&signals, &signal);
    stop = true;
    for (std::thread& thread : running) thread.join();
    for (const auto& worker : workers) {
      for (const auto& [what, count] : worker->did()) did[what] += count;
    }
  }
  std::string line;
  for (const auto& [what, count] : did) {
    line += (line.empty() ? "\"" : ", \"") + what + "\": " + std::to_string(count);
  }
  std::printf("done {%s}\n", line.c_str());
  return 0;
}

}  // namespace
}  // namespace kvmill::stress

int main(int argc, char** argv) {
  return kvmill::stress::Main(std::vector<std::string>(argv + 1, argv + argc));
}
