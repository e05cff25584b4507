// What TLS costs lookups: one daemon that wants certificates and one with --insecure, both over TCP
// on the loopback, take turns.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/client.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_certificates.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;

struct Settings {
  int rounds = 9;
  int lookups = 4000;
  int keys = 64;
  int depth = 8;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "tls_bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (!result.ok()) Fail(std::string(result.status().message()));
  return *std::move(result);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// "median (lowest-highest)"
std::string Spread(const std::vector<double>& values, const char* format) {
  char text[96];
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const std::string whole = absl::StrCat(format, " (", format, "-", format, ")");
  std::snprintf(text, sizeof(text), whole.c_str(), Median(values), *low, *high);
  return text;
}

// Of calls under way.
struct Window {
  const int depth;
  absl::Mutex mutex{};
  int under_way = 0;
  bool HasRoom() const { return under_way < depth; }
  bool IsEmpty() const { return under_way == 0; }
};

// A daemon, a client, and blocks that all lookups find.
class Side {
 public:
  Side(const std::vector<std::string>& listen, const TlsFiles& tls, int keys) {
    std::vector<std::string> arguments = {"--socket",     directory_ / "kvmill.sock",
                                          "--device",     "host",
                                          "--host-bytes", "64MiB",
                                          "--listen",     "127.0.0.1:0"};
    arguments.insert(arguments.end(), listen.begin(), listen.end());
    daemon_ = std::make_unique<DaemonProcess>(DaemonBinary(), arguments);
    const nlohmann::json ready = daemon_->WaitReady();
    if (ready.is_null()) Fail(daemon_->standard_error());
    Client::Options options;
    options.address = ready["listen"].get<std::string>();
    options.tls = tls;
    options.path = DataPath::kInline;
    client_ = Need(Client::Create(options));
    NamespaceSpec spec;
    spec.model = "bench";
    spec.hash_scheme = "bench-1";
    spec.block_tokens = 64;
    LayerGroup group;
    group.layers = {0};
    group.kv_heads = 1;
    group.head_dim = 64;
    spec.groups = {group};
    ns_ = Need(client_->OpenNamespace("bench", spec));
    const std::vector<std::uint16_t> values(64 * 64, 0x3c00);
    const LayerInput layer{KvView::Array(values.data(), 1, 64),
                           KvView::Array(values.data(), 1, 64)};
    std::vector<StoreBlock> blocks(static_cast<std::size_t>(keys));
    for (int i = 0; i < keys; ++i) {
      // As long as a SHA-256.
      std::string bytes = absl::StrCat("block ", i);
      bytes.resize(32, '.');
      keys_.push_back(*BlockKey::FromBytes(bytes));
      StoreBlock& block = blocks[static_cast<std::size_t>(i)];
      block.key = keys_.back();
      if (i > 0) block.parent = keys_[static_cast<std::size_t>(i) - 1];
      block.token_count = 64;
      block.block_index = static_cast<std::uint32_t>(i);
      block.layers = absl::MakeConstSpan(&layer, 1);
    }
    Need(client_->Store(ns_, blocks, {}));
  }

  // Microseconds of each of `lookups`.
  std::vector<double> OneAtATime(int lookups) {
    std::vector<double> micros;
    for (int i = 0; i < lookups; ++i) {
      const auto begin = steady_clock::now();
      Check(client_->Lookup(ns_, keys_));
      micros.push_back(
          std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count());
    }
    return micros;
  }

  // Lookups a second with `depth` under way.
  double Rate(int lookups, int depth) {
    Window window{depth};
    const auto begin = steady_clock::now();
    for (int i = 0; i < lookups; ++i) {
      {
        const absl::MutexLock lock(&window.mutex, absl::Condition(&window, &Window::HasRoom));
        ++window.under_way;
      }
      client_->LookupAsync(ns_, keys_, {}, {}, [&](const absl::StatusOr<LookupResult>& result) {
        Check(result);
        const absl::MutexLock lock(&window.mutex);
        --window.under_way;
      });
    }
    const absl::MutexLock lock(&window.mutex, absl::Condition(&window, &Window::IsEmpty));
    return lookups / std::chrono::duration<double>(steady_clock::now() - begin).count();
  }

 private:
  void Check(const absl::StatusOr<LookupResult>& result) const {
    if (!result.ok()) Fail(std::string(result.status().message()));
    if (result->hit_blocks != keys_.size()) Fail("a lookup found less");
  }

  TemporaryDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  ClientNamespace ns_;
  std::vector<BlockKey> keys_;
};

void Run(const Settings& settings) {
  TestAuthority authority;
  const auto node = authority.Issue("node", "DNS:bench-node,IP:127.0.0.1");
  const auto engine = authority.Issue("engine", "");
  TlsFiles files;
  files.ca = authority.ca_path();
  files.certificate = engine.certificate;
  files.key = engine.key;
  Side plain({"--insecure"}, {}, settings.keys);
  Side tls({"--tls-ca", authority.ca_path(), "--tls-cert", node.certificate, "--tls-key", node.key},
           files, settings.keys);
  std::vector<double> plain_rate, tls_rate, rate_ratio, plain_p50, tls_p50, p50_ratio;
  for (int round = -1; round < settings.rounds; ++round) {
    const double rates[2] = {plain.Rate(settings.lookups, settings.depth),
                             tls.Rate(settings.lookups, settings.depth)};
    const double p50s[2] = {Median(plain.OneAtATime(settings.lookups / 4)),
                            Median(tls.OneAtATime(settings.lookups / 4))};
    if (round < 0) continue;  // Connections, certificates, caches.
    plain_rate.push_back(rates[0]);
    tls_rate.push_back(rates[1]);
    rate_ratio.push_back(rates[1] / rates[0]);
    plain_p50.push_back(p50s[0]);
    tls_p50.push_back(p50s[1]);
    p50_ratio.push_back(p50s[1] / p50s[0]);
  }
  std::printf("lookups of %d keys, median (range) of %d rounds\n", settings.keys, settings.rounds);
  std::printf("lookups/s, %d at once   plain %s  TLS %s  ratio %s\n", settings.depth,
              Spread(plain_rate, "%.0f").c_str(), Spread(tls_rate, "%.0f").c_str(),
              Spread(rate_ratio, "%.3f").c_str());
  std::printf("p50 us, one at a time  plain %s  TLS %s  ratio %s\n",
              Spread(plain_p50, "%.0f").c_str(), Spread(tls_p50, "%.0f").c_str(),
              Spread(p50_ratio, "%.3f").c_str());
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) {
#ifdef NDEBUG
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // As in the daemon.
#endif
  kvmill::testing::Settings settings;
  CLI::App app("What TLS costs lookups: a daemon with certificates and one without take turns.");
  app.add_option("--rounds", settings.rounds, "Of both")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--lookups", settings.lookups, "Of a round; a quarter as many one at a time")
      ->check(CLI::Range(8, 1000000))
      ->capture_default_str();
  app.add_option("--keys", settings.keys, "Of a lookup")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--depth", settings.depth, "Lookups at once")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  kvmill::testing::Run(settings);
  return 0;
}
