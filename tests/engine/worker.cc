#include "tests/engine/worker.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill::engine {
namespace {

using Json = nlohmann::json;

// Messages between the processes: a length of four bytes, then CBOR.
bool SendAll(int socket, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, from, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    from += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool ReceiveAll(int socket, void* data, std::size_t bytes) {
  return bytes == 0 || recv(socket, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

bool Send(int socket, const Json& message) {
  const std::vector<std::uint8_t> bytes = Json::to_cbor(message);
  const auto length = static_cast<std::uint32_t>(bytes.size());
  return SendAll(socket, &length, sizeof(length)) && SendAll(socket, bytes.data(), bytes.size());
}

bool Receive(int socket, Json* message) {
  std::uint32_t length = 0;
  if (!ReceiveAll(socket, &length, sizeof(length))) return false;
  std::vector<std::uint8_t> bytes(length);
  if (!ReceiveAll(socket, bytes.data(), bytes.size())) return false;
  *message = Json::from_cbor(bytes);
  return true;
}

}  // namespace

LocalWorker::LocalWorker(const EngineConfig& config, std::uint32_t rank)
    : config_(config),
      head_begin_(config.shape.heads / config.ranks * rank),
      memory_(config.shape, config.layout, config.shape.heads / config.ranks, config.page_count),
      shadow_(config.shape),
      connector_(config, rank, memory_) {}

absl::Status LocalWorker::StartStep(const StepPlan& plan) {
  plan_ = plan;
  return absl::OkStatus();
}

absl::StatusOr<StepReport> LocalWorker::FinishStep() {
  StepReport report;
  connector_.HandlePreemptions(plan_.preempted);
  connector_.HandleAborts(plan_.aborted);
  for (const Order& load : plan_.loads) {
    for (const BlockPages& block : load.blocks) {
      if (block.hashes.size() == config_.shape.block_tokens) shadow_.Remember(block.hashes);
    }
  }
  connector_.StartLoads(plan_.loads);
  std::set<PageId> failed;
  if (config_.loads_in_step) failed = connector_.WaitForLoads();
  std::set<std::uint64_t> lost;  // The scheduler learns of it and repeats the step for them.
  for (const Work& work : plan_.work) {
    const std::vector<PageId>& pages = work.sequence.pages;
    if (std::any_of(pages.begin(), pages.end(),
                    [&failed](PageId page) { return failed.count(page) != 0; })) {
      lost.insert(work.sequence.request);
    }
  }
  const bool first =
      config_.fault == Fault::kStoresBeforeComputing || config_.store_path == StorePath::kPages;
  if (first) connector_.StartSaves(plan_.saves, lost);
  if (config_.fault == Fault::kStoresBeforeComputing) connector_.WaitForSaves();
  for (const Work& work : plan_.work) {
    if (lost.count(work.sequence.request) != 0) continue;
    // Attention reads every page before `begin`.
    std::string wrong = shadow_.Check(work.sequence, work.begin, head_begin_, memory_);
    if (!wrong.empty()) report.violations.push_back(std::move(wrong));
  }
  for (std::uint32_t layer = 0; layer < config_.shape.layers; ++layer) {
    for (const Work& work : plan_.work) {
      if (lost.count(work.sequence.request) == 0) Compute(work, layer);
    }
    connector_.Ready(layer + 1);
  }
  if (!first) connector_.StartSaves(plan_.saves, lost);
  if (plan_.step == config_.last_rank_dies_at &&
      head_begin_ + memory_.head_count() == config_.shape.heads) {
    raise(SIGKILL);
  }
  connector_.GetFinished(plan_, &report);
  if (plan_.last) {
    std::string wrong = memory_.CheckPadding();
    if (!wrong.empty()) report.violations.push_back(std::move(wrong));
  }
  return report;
}

void LocalWorker::Compute(const Work& work, std::uint32_t layer) {
  std::vector<std::uint16_t> row(config_.shape.head_dim);
  for (std::uint32_t token = work.begin; token < work.end; ++token) {
    const PageId page = work.sequence.pages[token / kPageTokens];
    for (std::uint32_t head = 0; head < memory_.head_count(); ++head) {
      for (const bool value : {false, true}) {
        FillRow(config_.shape, work.sequence.hashes[token], layer, head_begin_ + head, value,
                row.data());
        std::memcpy(memory_.Row(layer, value, page, token % kPageTokens, head), row.data(),
                    config_.shape.row_bytes());
      }
    }
  }
}

ProcessWorker::ProcessWorker(const std::string& binary, const EngineConfig& config,
                             std::uint32_t rank) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  const std::string number = std::to_string(ends[1]);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(ends[1], F_SETFD, 0);  // This one goes with it.
    execl(binary.c_str(), binary.c_str(), number.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  socket_ = ends[0];
  Send(socket_, {{"config", config}, {"rank", rank}});
}

ProcessWorker::~ProcessWorker() {
  if (socket_ >= 0) close(socket_);  // It ends by itself.
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

absl::Status ProcessWorker::StartStep(const StepPlan& plan) {
  if (Send(socket_, plan)) return absl::OkStatus();
  return absl::UnavailableError("the worker process is gone");
}

absl::StatusOr<StepReport> ProcessWorker::FinishStep() {
  Json message;
  if (!Receive(socket_, &message)) return absl::UnavailableError("the worker process is gone");
  if (message.contains("error")) {
    return absl::InternalError(message["error"].get<std::string>());
  }
  return message.get<StepReport>();
}

int RunWorkerProcess(int socket) {
  Json message;
  if (!Receive(socket, &message)) return 1;
  LocalWorker worker(message["config"].get<EngineConfig>(), message["rank"].get<std::uint32_t>());
  const absl::Status connected = worker.Connect();
  while (Receive(socket, &message)) {
    Json reply;
    if (!connected.ok()) {
      reply["error"] = connected.ToString();
    } else {
      worker.StartStep(message.get<StepPlan>()).IgnoreError();  // Only takes the plan.
      reply = *worker.FinishStep();
    }
    if (!Send(socket, reply)) return 1;
  }
  return 0;
}

}  // namespace kvmill::engine
