// Two processes on loopback and the transport between them, against ucx_perftest in the same run.
//
// Each round measures, one after the other: ucx_perftest (active messages, error handling on), as
// it comes and with as many sends at once as we have, and our copies of the same size, plaintext
// and encrypted; and gets of 64 and 256 KiB. Prints the median of the rounds and the range. Rates
// are 1e9 bytes a second; CPU is what both processes used, in nanoseconds a byte. Needs ucx-utils
// for the comparison.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/transport/transport.h"
#include "client/transport/ucx_transport.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Settings {
  int rounds = 5;
  bool perftest = true;
  std::string only;  // "put" or "get": nothing else.
  int window = 8;    // Puts at once, ours and ucx_perftest's: what a Store of a client has.
  UcxOptions ucx;
  std::string text;  // Of ucx.settings.
  std::uint32_t segment_bytes = TransportLimits{}.segment_bytes_max;
};

// Serves `get` (its payload is the answer) and takes whatever is put.
class Server final : public TransportHandler {
 public:
  Server() : data_(kBytesMax, std::byte{5}) {}
  void OnCall(const ConnectionPtr& /*connection*/, std::unique_ptr<IncomingCall> call) override {
    if (call->payload_bytes() == 0) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, call->header().data(), sizeof(bytes));
      call->Respond({.payload = {absl::MakeConstSpan(data_).first(bytes)}});
      return;
    }
    auto shared = std::make_shared<std::unique_ptr<IncomingCall>>(std::move(call));
    IncomingCall* const raw = shared->get();
    raw->Receive({absl::MakeSpan(data_).first(raw->payload_bytes())}, MemoryKind::kHost,
                 [shared](absl::Status status) { (*shared)->Respond({.status = status}); });
  }
  static constexpr std::size_t kBytesMax = 16 << 20;

 private:
  std::vector<std::byte> data_;
};

// The other process: writes its offer to `out` and serves until `in` ends.
[[noreturn]] void Serve(const Settings& settings, bool plaintext, int in, int out) {
  Server server;
  TransportOptions options;
  options.self = {NodeIdentity::IdOf("server"), 1};
  options.plaintext = plaintext;
  options.limits.segment_bytes_max = settings.segment_bytes;
  options.handler = &server;
  UcxOptions ucx = settings.ucx;
  ucx.listen = {"127.0.0.1:0"};
  auto transport = MakeUcxTransport(options, ucx);
  if (!transport.ok()) {
    std::fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    _exit(1);
  }
  const Offer offer = *(*transport)->MakeOffer(1);
  std::array<char, 64> address{};
  std::snprintf(address.data(), address.size(), "%s", offer.addresses[0].c_str());
  char c = 0;
  if (write(out, address.data(), address.size()) < 0 ||
      write(out, offer.key_id.data(), offer.key_id.size()) < 0 ||
      write(out, offer.key.data(), offer.key.size()) < 0 || read(in, &c, 1) != 0) {
    _exit(1);
  }
  transport->reset();
  _exit(0);
}

double CpuSeconds(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A connection to a process of its own.
class Bench {
 public:
  Bench(const Settings& settings, bool plaintext) {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) std::exit(1);
    pid_ = fork();
    if (pid_ == 0) {
      // A program of its own: UCX does not survive a fork.
      dup2(to[0], 0);
      dup2(from[1], 1);
      execl("/proc/self/exe", "transport_bench", plaintext ? "--serve-plaintext" : "--serve",
            "--tls", settings.ucx.tls.c_str(), "--settings", settings.text.c_str(), "--segment",
            std::to_string(settings.segment_bytes).c_str(), nullptr);
      _exit(127);
    }
    close(from[1]);
    close(to[0]);
    to_ = to[1];
    std::array<char, 64> address{};
    Offer offer;
    offer.node = {NodeIdentity::IdOf("server"), 1};
    if (read(from[0], address.data(), address.size()) <= 0 ||
        read(from[0], offer.key_id.data(), offer.key_id.size()) <= 0 ||
        read(from[0], offer.key.data(), offer.key.size()) <= 0) {
      std::exit(1);
    }
    offer.addresses = {address.data()};
    TransportOptions options;
    options.self = {NodeIdentity::IdOf("client"), 2};
    options.plaintext = plaintext;
    options.limits.segment_bytes_max = settings.segment_bytes;
    auto made = MakeUcxTransport(options, settings.ucx);
    if (!made.ok()) {
      std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
      std::exit(1);
    }
    transport_ = *std::move(made);
    transport_->Connect(offer, {.done = [this](absl::StatusOr<ConnectionPtr> connection) {
                          if (!connection.ok()) {
                            std::fprintf(stderr, "connect: %s\n",
                                         connection.status().ToString().c_str());
                            std::exit(1);
                          }
                          const MutexLock lock(mu_);
                          connection_ = *connection;
                          changed_.NotifyAll();
                        }});
    const MutexLock lock(mu_);
    while (connection_ == nullptr) changed_.Wait(mu_);
  }
  ~Bench() {
    transport_.reset();
    close(to_);
    waitpid(pid_, nullptr, 0);
  }

  // `count` calls of `bytes`, `window` at a time. Seconds of all; of each, in `latencies`.
  double Run(bool get, std::size_t bytes, int count, int window, std::vector<double>* latencies) {
    data_.resize(bytes * static_cast<std::size_t>(window));
    const auto begin = Clock::now();
    {
      const MutexLock lock(mu_);
      left_ = count;
      free_.clear();
      for (int i = 0; i < window; ++i) free_.push_back(i);
    }
    for (int i = 0; i < count; ++i) {
      int slot = 0;
      {
        const MutexLock lock(mu_);
        while (free_.empty()) changed_.Wait(mu_);
        slot = free_.back();
        free_.pop_back();
      }
      Call call;
      call.timeout_nanos = 30'000'000'000;
      // Puts read one buffer, as ucx_perftest does; answers need places of their own.
      const absl::Span<std::byte> place =
          absl::MakeSpan(data_).subspan(get ? static_cast<std::size_t>(slot) * bytes : 0, bytes);
      if (get) {
        call.header.resize(sizeof(std::uint64_t));
        const std::uint64_t wanted = bytes;
        std::memcpy(call.header.data(), &wanted, sizeof(wanted));
        call.place = [place](const ResponseHead&, DestinationSpans* spans) {
          spans->push_back(place);
          return absl::OkStatus();
        };
      } else {
        call.payload = {place};
      }
      const auto started = Clock::now();
      call.done = [this, slot, started, latencies, get, bytes,
                   count](absl::StatusOr<Response> response) {
        if (!response.ok()) {
          std::fprintf(stderr, "%s %zu of %zu: %s\n", get ? "get" : "put", bytes,
                       static_cast<std::size_t>(count), response.status().ToString().c_str());
          std::exit(1);
        }
        const MutexLock lock(mu_);
        if (latencies != nullptr) latencies->push_back(Seconds(started));
        free_.push_back(slot);
        --left_;
        changed_.NotifyAll();
      };
      connection_->Start(std::move(call));
    }
    const MutexLock lock(mu_);
    while (left_ > 0) changed_.Wait(mu_);
    return Seconds(begin);
  }
  const std::string& transport() const { return connection_->info().transport; }
  // Of both processes so far.
  double Cpu() const {
    double total = CpuSeconds(RUSAGE_SELF);
    // The child's threads, in nanoseconds.
    for (const std::string& path : TaskFiles()) {
      FILE* const task = std::fopen(path.c_str(), "r");
      unsigned long long nanos = 0;
      if (task != nullptr && std::fscanf(task, "%llu", &nanos) == 1) {
        total += 1e-9 * static_cast<double>(nanos);
      }
      if (task != nullptr) std::fclose(task);
    }
    return total;
  }

 private:
  std::vector<std::string> TaskFiles() const {
    std::vector<std::string> files;
    for (const auto& task :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", pid_, "/task"))) {
      files.push_back(task.path().string() + "/schedstat");
    }
    return files;
  }

  pid_t pid_ = -1;
  int to_ = -1;
  std::unique_ptr<Transport> transport_;
  Mutex mu_;
  CondVar changed_;
  ConnectionPtr connection_;
  std::vector<std::byte> data_;
  int left_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<int> free_ ABSL_GUARDED_BY(mu_);
};

// What ucx_perftest says for these sizes, in bytes a second; 0 when it cannot be run. `outstanding`
// sends at once; 0: its default.
double Perftest(const Settings& settings, std::size_t bytes, int count, int outstanding) {
  static int port = 20000 + static_cast<int>(getpid() % 20000);
  ++port;
  const std::string tls =
      settings.ucx.tls.empty() ? "" : absl::StrCat("UCX_TLS=", settings.ucx.tls);
  const std::string program = absl::StrCat(tls, " timeout 30 ucx_perftest -p ", port);
  const std::string command =
      absl::StrCat("(", program, " >/dev/null 2>&1 &) ; sleep 0.5; ", program,
                   " 127.0.0.1 -t ucp_am_bw -e -f -O ", outstanding, " -s ", bytes, " -n ", count,
                   " -w 100 2>/dev/null | tail -1");
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return 0;
  std::array<char, 512> line{};
  const bool any = std::fgets(line.data(), line.size(), pipe) != nullptr;
  pclose(pipe);
  if (!any) return 0;
  // Iterations, percentile, average and overall latency, average and overall MB/s (of 2^20), ...
  const std::vector<std::string> words =
      absl::StrSplit(line.data(), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  double rate = 0;
  if (words.size() < 6 || !absl::SimpleAtod(words[5], &rate)) return 0;
  return rate * 1048576;
}

struct Median {
  std::vector<double> values;
  void Add(double value) { values.push_back(value); }
  std::string Text(const char* format) {
    std::sort(values.begin(), values.end());
    std::array<char, 128> text{};
    const std::string pattern = absl::StrCat(format, " (", format, "-", format, ")");
    std::snprintf(text.data(), text.size(), pattern.c_str(), values[values.size() / 2],
                  values.front(), values.back());
    return text.data();
  }
};

int Main(const Settings& settings) {
  struct Size {
    std::size_t bytes;
    int count;
    Median perftest, ratio, alike, alike_ratio, put, sealed_put, cpu, sealed_cpu;
  };
  std::vector<Size> sizes;
  sizes.push_back({.bytes = 1 << 20, .count = 1600});
  sizes.push_back({.bytes = 4 << 20, .count = 400});
  sizes.push_back({.bytes = 16 << 20, .count = 100});
  struct Get {
    std::size_t bytes;
    bool plaintext;
    Median p50_us, p99_us, rate1, rate8;
  };
  std::vector<Get> gets;
  for (const bool plaintext : {true, false}) {
    for (const std::size_t bytes : {64 << 10, 256 << 10, 1 << 20}) {
      gets.push_back({.bytes = bytes, .plaintext = plaintext});
    }
  }
  std::string transport;
  for (int round = 0; round < settings.rounds; ++round) {
    for (Size& size : sizes) {
      if (settings.only == "get") break;
      const auto perftest = [&](int outstanding) {
        return settings.perftest ? Perftest(settings, size.bytes, size.count, outstanding) : 0;
      };
      const double theirs = perftest(0);
      const double alike = perftest(settings.window);
      if (theirs > 0) size.perftest.Add(theirs / 1e9);
      if (alike > 0) size.alike.Add(alike / 1e9);
      for (const bool plaintext : {true, false}) {
        Bench bench(settings, plaintext);
        transport = bench.transport();
        bench.Run(false, size.bytes, size.count / 10, settings.window, nullptr);
        const double cpu = bench.Cpu();
        const double seconds = bench.Run(false, size.bytes, size.count, settings.window, nullptr);
        const double all = static_cast<double>(size.bytes) * size.count;
        (plaintext ? size.put : size.sealed_put).Add(all / seconds / 1e9);
        (plaintext ? size.cpu : size.sealed_cpu).Add((bench.Cpu() - cpu) / all * 1e9);
        if (plaintext && theirs > 0) size.ratio.Add(all / seconds / theirs);
        if (plaintext && alike > 0) size.alike_ratio.Add(all / seconds / alike);
      }
    }
    for (Get& get : gets) {
      if (settings.only == "put") break;
      Bench bench(settings, get.plaintext);
      bench.Run(true, get.bytes, 200, 1, nullptr);
      std::vector<double> latencies;
      const int count = static_cast<int>((std::size_t{128} << 20) / get.bytes);
      double seconds = bench.Run(true, get.bytes, count, 1, &latencies);
      std::sort(latencies.begin(), latencies.end());
      get.p50_us.Add(1e6 * latencies[latencies.size() / 2]);
      get.p99_us.Add(1e6 * latencies[latencies.size() * 99 / 100]);
      get.rate1.Add(static_cast<double>(get.bytes) * count / seconds / 1e9);
      seconds = bench.Run(true, get.bytes, 2 * count, 8, nullptr);
      get.rate8.Add(2 * static_cast<double>(get.bytes) * count / seconds / 1e9);
    }
  }
  if (transport.empty()) transport = settings.ucx.tls;
  std::printf("transport %s, %d rounds: median (range)\n", transport.c_str(), settings.rounds);
  for (Size& size : sizes) {
    if (size.put.values.empty()) break;
    std::printf("put %5zu KiB  plaintext %s GB/s, CPU %s ns/B  encrypted %s GB/s, CPU %s ns/B",
                size.bytes >> 10, size.put.Text("%.2f").c_str(), size.cpu.Text("%.2f").c_str(),
                size.sealed_put.Text("%.2f").c_str(), size.sealed_cpu.Text("%.2f").c_str());
    if (!size.ratio.values.empty()) {
      std::printf("  ucx_perftest %s GB/s, ratio %s", size.perftest.Text("%.2f").c_str(),
                  size.ratio.Text("%.2f").c_str());
      std::printf("  with as many at once %s GB/s, ratio %s", size.alike.Text("%.2f").c_str(),
                  size.alike_ratio.Text("%.2f").c_str());
    }
    std::printf("\n");
  }
  for (Get& get : gets) {
    if (get.rate1.values.empty()) break;
    std::printf(
        "get %5zu KiB  %s  p50 %s us, p99 %s us, one at a time %s GB/s, 8 at once %s GB/s\n",
        get.bytes >> 10, get.plaintext ? "plaintext" : "encrypted", get.p50_us.Text("%.0f").c_str(),
        get.p99_us.Text("%.0f").c_str(), get.rate1.Text("%.2f").c_str(),
        get.rate8.Text("%.2f").c_str());
  }
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  kvmill::Settings settings;
  settings.ucx.tls = "tcp";
  bool serve = false, serve_plaintext = false, no_perftest = false;
  CLI::App app("Two processes on loopback and the transport between them, beside ucx_perftest.");
  app.add_option("--rounds", settings.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--tls", settings.ucx.tls, "UCX_TLS")->capture_default_str();
  app.add_option("--settings", settings.text, "NAME=VALUE,... of UCX");
  app.add_option("--segment", settings.segment_bytes, "Bytes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--window", settings.window, "Puts at once")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--only", settings.only)->check(CLI::IsMember({"put", "get"}));
  app.add_flag("--no-perftest", no_perftest, "Nothing beside it");
  // Of the other process, which this one starts.
  app.add_flag("--serve", serve)->group("");
  app.add_flag("--serve-plaintext", serve_plaintext)->group("");
  CLI11_PARSE(app, argc, argv);
  settings.perftest = !no_perftest;
  for (const auto& setting : absl::StrSplit(settings.text, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(setting, absl::MaxSplits('=', 1));
    settings.ucx.settings.push_back(pair);
  }
  if (serve || serve_plaintext) kvmill::Serve(settings, serve_plaintext, 0, 1);
  return kvmill::Main(settings);
}
