// top: the daemon, live.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/top_frame.h"
#include "client/cli/top_model.h"
#include "client/cli/top_screen.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kTopHelp =
    "Tiers, hit rates, throughput and sessions of the daemon, until q or Ctrl-C; exit code 0.\n"
    "  tiers        what is used, and blocks that left to make room\n"
    "  hit rate     of the blocks looked up in the last interval; since start; and where they "
    "were\n"
    "  in, out      bytes of blocks by way: 16-bit values and tiles in, pages out; for map the "
    "pages\n"
    "               that were put under lease\n"
    "  compression  16-bit bytes taken in / bytes stored for them, since start\n"
    "When the daemon is gone it says so and goes on asking; after a restart rates begin again.\n"
    "Where standard output is no terminal, a frame of 80 columns is printed an interval, one "
    "below\n"
    "the other, and for another user than the daemon's counters are 0. NO_COLOR is respected.\n"
    "\n"
    "Examples:\n"
    "  kvmill top\n"
    "  kvmill top --once --interval 5s\n";

constexpr absl::Duration kIntervalMin = absl::Milliseconds(100);
constexpr absl::Duration kIntervalMax = absl::Hours(1);
constexpr std::size_t kPlainWidth = 80;

struct TopOptions {
  absl::Duration interval = absl::Seconds(1);
  bool once = false;
};

// Asks the daemon, one question at a time, while the caller waits for other things as well.
class Questions {
 public:
  explicit Questions(std::unique_ptr<Client> client)
      : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), client_(std::move(client)) {}
  ~Questions() {
    client_.reset();  // Its completions write to the descriptor.
    close(fd_);
  }
  Questions(const Questions&) = delete;
  Questions& operator=(const Questions&) = delete;

  int fd() const { return fd_; }  // Readable when there is an answer.
  bool waiting() const { return waiting_; }

  void Ask() {
    waiting_ = true;
    client_->StatAsync({}, [this](absl::StatusOr<ServerStat> stat) {
      {
        MutexLock lock(mu_);
        answer_ = std::move(stat);
      }
      const std::uint64_t one = 1;
      static_cast<void>(write(fd_, &one, sizeof(one)));
    });
  }

  std::optional<absl::StatusOr<ServerStat>> Take() {
    std::uint64_t count = 0;
    static_cast<void>(read(fd_, &count, sizeof(count)));
    MutexLock lock(mu_);
    std::optional<absl::StatusOr<ServerStat>> answer = std::exchange(answer_, std::nullopt);
    if (answer.has_value()) waiting_ = false;
    return answer;
  }

 private:
  const int fd_;
  bool waiting_ = false;
  Mutex mu_;
  std::optional<absl::StatusOr<ServerStat>> answer_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Client> client_;
};

// False when nobody reads any more.
bool Print(const std::vector<TopLine>& lines) {
  for (const TopLine& line : lines) std::cout << line.text << "\n";
  std::cout << std::endl;
  return std::cout.good();
}

// Two answers, an interval apart: rates need both.
absl::Status Once(const CommonFlags& common, const TopOptions& options) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  TopModel model(common.server, options.interval, absl::Now());
  for (int i = 0; i < 2; ++i) {
    if (i > 0) absl::SleepFor(options.interval);
    KVMILL_ASSIGN_OR_RETURN(const ServerStat stat, client->Stat());
    model.OnStat(stat, absl::Now());
  }
  Print(DrawTop(model.View(absl::Now()), kPlainWidth));
  return absl::OkStatus();
}

absl::Status Live(const CommonFlags& common, const TopOptions& options) {
  const TopSignals signals;  // Before the threads of the client.
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Connect(common));
  Questions questions(std::move(client));
  const std::unique_ptr<TopScreen> screen = TopScreen::Open();
  const int keys = screen != nullptr && isatty(STDIN_FILENO) == 1 ? STDIN_FILENO : -1;
  TopModel model(common.server, options.interval, absl::Now());
  absl::Time next_question = absl::Now();
  absl::Time next_frame = next_question + options.interval;
  while (!signals.ended()) {
    const absl::Time now = absl::Now();
    if (!questions.waiting() && now >= next_question) {
      questions.Ask();
      next_question = now + options.interval;
    }
    const bool due = now >= next_frame;
    if (due) next_frame = now + options.interval;
    if (screen != nullptr) {
      if (screen->TakeKeys()) break;
      screen->Draw(DrawTop(model.View(now), screen->width()));
    } else if (due && !Print(DrawTop(model.View(now), kPlainWidth))) {
      std::cout.clear();  // Who reads has seen enough: no failure.
      break;
    }
    if (!signals.WaitReadable({keys, questions.fd()}, next_frame - absl::Now())) break;
    if (const auto answer = questions.Take(); answer.has_value()) {
      if (answer->ok()) {
        model.OnStat(**answer, absl::Now());
      } else {
        model.OnError(answer->status());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Top(const CommonFlags& common, const TopOptions& options) {
  if (common.json) return UsageError("--json: a live view has none; 'kvmill stat' has");
  return options.once ? Once(common, options) : Live(common, options);
}

}  // namespace

void AddTopCommand(CommandLine& line) {
  auto options = std::make_shared<TopOptions>();
  CLI::App* app = line.Add(line.root(), "top", "The daemon, live", kTopHelp,
                           [&line, options] { return Top(line.flags(), *options); });
  app->add_option_function<std::string>(
         "--interval",
         [options](const std::string& text) {
           const absl::StatusOr<absl::Duration> interval = ParseTimeout(text);
           if (!interval.ok()) {
             throw CLI::ValidationError("--interval", std::string(interval.status().message()));
           }
           if (*interval < kIntervalMin || *interval > kIntervalMax) {
             throw CLI::ValidationError("--interval", absl::StrCat(text, ", want 100ms to 1h"));
           }
           options->interval = *interval;
         },
         "Between frames, as 500ms or 5s (default 1s)")
      ->type_name("DURATION");
  app->add_flag("--once", options->once,
                "Print one frame, of one interval, and end; exit code 1 without an answer");
}

}  // namespace kvmill::cli
