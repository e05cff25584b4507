// One rank: its memory, its connector, and what a step does to them. In this process or in one of
// its own.
#ifndef KVMILL_TESTS_ENGINE_WORKER_H_
#define KVMILL_TESTS_ENGINE_WORKER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/engine/connector.h"
#include "tests/engine/kv_memory.h"
#include "tests/engine/plan.h"
#include "tests/engine/shadow.h"

namespace kvmill::engine {

class Worker {
 public:
  virtual ~Worker() = default;
  // Start, then Finish; several workers can be between the two at once.
  virtual absl::Status StartStep(const StepPlan& plan) = 0;
  virtual absl::StatusOr<StepReport> FinishStep() = 0;
};

// Runs a step in FinishStep, on the caller's thread.
class LocalWorker : public Worker {
 public:
  LocalWorker(const EngineConfig& config, std::uint32_t rank);
  absl::Status Connect() { return connector_.Connect(); }
  absl::Status StartStep(const StepPlan& plan) override;
  absl::StatusOr<StepReport> FinishStep() override;

 private:
  void Compute(const Work& work, std::uint32_t layer);

  const EngineConfig config_;
  const std::uint32_t head_begin_;
  KvMemory memory_;
  Shadow shadow_;
  WorkerConnector connector_;
  StepPlan plan_;
};

// A rank in a process of its own: `engine_worker`, which runs RunWorkerProcess.
class ProcessWorker : public Worker {
 public:
  ProcessWorker(const std::string& binary, const EngineConfig& config, std::uint32_t rank);
  ~ProcessWorker() override;
  absl::Status StartStep(const StepPlan& plan) override;
  absl::StatusOr<StepReport> FinishStep() override;

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

// The other end of a ProcessWorker; returns when that is gone. The exit status of the process.
int RunWorkerProcess(int socket);

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_WORKER_H_
