#include "tests/cuda_harness/executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "absl/strings/str_cat.h"

// Of the program's image, from the C runtime and the linker: constants lie before the data.
extern "C" char __executable_start;
extern "C" char data_start;

namespace kvmill {
namespace cuda_harness {
namespace {

namespace context = boost::context::detail;

constexpr std::size_t kThreadsMax = 1024;
constexpr std::size_t kStackBytes = 128 << 10;
constexpr std::size_t kGuardBytes = 4096;  // Below each stack: running over it ends the program.

Executor* current_executor = nullptr;

std::string AtSite(const Site& site) {
  const char* slash = std::strrchr(site.file, '/');
  const std::string name = slash == nullptr ? site.file : slash + 1;
  return site.line == 0 ? name : name + ":" + std::to_string(site.line);
}

bool IsSame(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

void Add(const Knowledge& from, Knowledge& to) {
  for (const auto& [block, barriers] : from) to[block] = std::max(to[block], barriers);
}

}  // namespace

Thread* kernel_thread = nullptr;

Executor* Executor::Current() { return current_executor; }

Executor::Executor(std::uint32_t seed) : random_(seed * 0x9E3779B97F4A7C15u + 1) {
  if (current_executor != nullptr) throw std::logic_error("one Harness at a time");
  void* const stacks =
      mmap(nullptr, kThreadsMax * (kGuardBytes + kStackBytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) throw std::runtime_error("cannot map the stacks");
  stacks_ = reinterpret_cast<std::uintptr_t>(stacks);
  for (std::size_t i = 0; i < kThreadsMax; ++i) {
    auto* guard = static_cast<std::byte*>(stacks) + i * (kGuardBytes + kStackBytes);
    if (mprotect(guard, kGuardBytes, PROT_NONE) != 0) throw std::runtime_error("mprotect");
  }
  current_executor = this;
}

Executor::~Executor() {
  munmap(reinterpret_cast<void*>(stacks_), kThreadsMax * (kGuardBytes + kStackBytes));
  current_executor = nullptr;
}

std::uint64_t Executor::Random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_;
}

absl::Status Executor::Run(const device::LaunchShape& shape, const void* parameters,
                           std::size_t parameter_bytes, void (*body)(const void*)) {
  shape_ = shape;
  parameters_ = parameters;
  parameter_bytes_ = parameter_bytes;
  body_ = body;
  released_.clear();
  failed_ = false;
  ++launch_;
  if (shape.blocks == 0 || shape.threads == 0 || shape.threads > kThreadsMax ||
      shape.threads % 32 != 0 || shape.shared_bytes > shared_bytes_max_) {
    faults_.push_back({FaultKind::kBadLaunch, "blocks, threads or shared bytes out of range"});
    return absl::InternalError(faults_.back().what);
  }
  std::vector<unsigned> order(shape.blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Random() % i]);
  for (const unsigned block : order) {
    RunBlock(block);
    if (failed_) {
      const Fault& fault = faults_.back();
      return absl::InternalError(ToString(fault.kind) + ": " + fault.what);
    }
  }
  return absl::OkStatus();
}

void Executor::RunBlock(unsigned block) {
  block_ = block;
  shared_ = memory_.OpenShared(shape_.shared_bytes);
  threads_.assign(shape_.threads, Thread());
  ready_.clear();
  at_barrier_ = 0;
  barrier_value_ = false;
  barriers_ = 0;
  warp_syncs_.assign(shape_.threads / 32, 0);
  warp_waiting_.assign(shape_.threads / 32, 0);
  known_.clear();
  for (unsigned i = 0; i < shape_.threads; ++i) {
    Thread& thread = threads_[i];
    thread.index = i;
    thread.stack = stacks_ + i * (kGuardBytes + kStackBytes) + kGuardBytes;
    thread.context = context::make_fcontext(reinterpret_cast<void*>(thread.stack + kStackBytes),
                                            kStackBytes, Enter);
    ready_.push_back(&thread);
  }
  std::size_t done = 0;
  while (done < threads_.size()) {
    if (ready_.empty()) {
      ReportStuck();
      return;
    }
    const std::size_t pick = Random() % ready_.size();
    std::swap(ready_[pick], ready_.back());
    running_ = ready_.back();
    ready_.pop_back();
    running_->context = context::jump_fcontext(running_->context, this).fctx;
    kernel_thread = nullptr;
    if (failed_) return;  // The fibers are abandoned: kernels own nothing.
    if (running_->state == Thread::State::kDone) ++done;
  }
}

void Executor::Enter(context::transfer_t from) {
  Executor& executor = *static_cast<Executor*>(from.data);
  executor.scheduler_ = from.fctx;
  Thread& self = *executor.running_;
  kernel_thread = &self;
  executor.body_(executor.parameters_);
  kernel_thread = nullptr;
  self.state = Thread::State::kDone;
  context::jump_fcontext(executor.scheduler_, nullptr);
}

void Executor::Suspend() { scheduler_ = context::jump_fcontext(scheduler_, nullptr).fctx; }

void Executor::Wake(Thread& thread) {
  thread.state = Thread::State::kReady;
  ready_.push_back(&thread);
}

void Executor::Fail(FaultKind kind, const std::string& what) {
  {
    std::string where = " (block " + std::to_string(block_) + ", thread " +
                        std::to_string(running_->index) + ", after " + AtSite(running_->site) + ")";
    faults_.push_back({kind, what + where});
  }
  failed_ = true;
  Suspend();
  std::abort();  // Never resumed.
}

// Nothing can run: name the operation that will never be complete.
void Executor::ReportStuck() {
  failed_ = true;
  const auto find = [this](Thread::State state) {
    return std::find_if(threads_.begin(), threads_.end(),
                        [state](const Thread& t) { return t.state == state; });
  };
  const auto at_barrier = find(Thread::State::kAtBarrier);
  const auto in_warp = find(Thread::State::kInWarp);
  if (in_warp != threads_.end()) {
    std::string absent;
    for (unsigned lane = 0; lane < 32; ++lane) {
      const Thread& other = threads_[in_warp->index / 32 * 32 + lane];
      const bool arrived =
          other.state == Thread::State::kInWarp && other.warp_kind == in_warp->warp_kind;
      if ((in_warp->warp_mask >> lane & 1u) != 0 && !arrived) {
        absl::StrAppend(&absent, " ", other.index);
      }
    }
    faults_.push_back({FaultKind::kWarpMask, "the warp operation at " + AtSite(in_warp->site) +
                                                 " waits for threads that do not come:" + absent});
    return;
  }
  const auto gone = find(Thread::State::kDone);
  faults_.push_back({FaultKind::kDivergentBarrier, "threads wait at the barrier at " +
                                                       AtSite(at_barrier->site) + ", but thread " +
                                                       std::to_string(gone->index) + " has ended"});
}

bool Executor::Barrier(const void* kind, bool value, Site site) {
  Thread& self = *running_;
  self.site = site;
  self.barrier_kind = kind;
  self.barrier_value = value;
  self.state = Thread::State::kAtBarrier;
  if (++at_barrier_ < threads_.size()) {
    Suspend();
    return barrier_value_;
  }
  for (const Thread& other : threads_) {
    if (other.barrier_kind != kind || !IsSame(other.site, site)) {
      Fail(FaultKind::kDivergentBarrier, "thread " + std::to_string(other.index) +
                                             " is at another barrier, " + AtSite(other.site));
    }
  }
  at_barrier_ = 0;
  barrier_value_ = false;
  ++barriers_;
  for (Thread& other : threads_) {
    barrier_value_ = barrier_value_ || other.barrier_value;
    Add(other.known, known_);
    if (&other != &self) Wake(other);
  }
  self.state = Thread::State::kReady;
  return barrier_value_;
}

void Executor::Rendezvous(const void* kind, unsigned mask, void* payload,
                          void (*execute)(void* const* payloads, unsigned mask), Site site) {
  Thread& self = *running_;
  self.site = site;
  const unsigned lane = self.index % 32;
  if ((mask >> lane & 1u) == 0) {
    Fail(FaultKind::kWarpMask, "the lane is not in its own mask");
  }
  self.warp_kind = kind;
  self.warp_mask = mask;
  self.warp_payload = payload;
  self.state = Thread::State::kInWarp;
  Thread* const warp = &threads_[self.index - lane];
  unsigned& waiting = warp_waiting_[self.index / 32];
  waiting |= 1u << lane;
  const auto must_agree = [&](int i) {
    const Thread& other = warp[i];
    if (other.warp_mask != mask || other.warp_kind != kind || !IsSame(other.site, site)) {
      Fail(FaultKind::kWarpMask, "lanes disagree: lane " + std::to_string(i) +
                                     " waits in another operation or with another mask, at " +
                                     AtSite(other.site));
    }
  };
  // Lanes that wait have agreed with each other: one of them speaks for all that this one names.
  const unsigned named = waiting & mask & ~(1u << lane);
  if (named != 0) must_agree(__builtin_ctz(named));
  for (unsigned rest = waiting & ~mask; rest != 0; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    if ((warp[i].warp_mask >> lane & 1u) != 0) must_agree(i);
  }
  if ((waiting & mask) != mask) {
    Suspend();
    return;
  }
  void* payloads[32] = {};
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    payloads[i] = warp[i].warp_payload;
  }
  execute(payloads, mask);
  waiting &= ~mask;
  for (unsigned rest = mask & ~(1u << lane); rest != 0; rest &= rest - 1) {
    Wake(warp[__builtin_ctz(rest)]);
  }
  self.state = Thread::State::kReady;
}

Stamp Executor::Now(AccessKind kind) const {
  Stamp now;
  now.launch = launch_;
  now.block = block_;
  now.barriers = barriers_;
  now.warp_syncs = warp_syncs_[running_->index / 32];
  now.thread = static_cast<std::uint16_t>(running_->index);
  now.who = Who::kThread;
  now.atomic = kind == AccessKind::kAtomic;
  return now;
}

bool Executor::IsBefore(const Stamp& stamp, const Stamp& now) const {
  if (stamp.who == Who::kNobody || stamp.launch != now.launch) return true;
  if (stamp.who == Who::kBlocks) return false;
  if (stamp.block != now.block) {
    const auto knows = [&stamp](const Knowledge& knowledge) {
      const auto known = knowledge.find(stamp.block);
      return known != knowledge.end() && stamp.barriers < known->second;
    };
    return knows(known_) || knows(running_->known);
  }
  if (stamp.barriers < now.barriers) return true;
  if (stamp.who == Who::kBlock || stamp.thread / 32 != now.thread / 32) return false;
  return stamp.warp_syncs < now.warp_syncs ||
         (stamp.who == Who::kThread && stamp.thread == now.thread);
}

std::string Executor::Describe(const Stamp& stamp) const {
  const char* const who = stamp.who == Who::kThread  ? "thread "
                          : stamp.who == Who::kWarp  ? "the warp of thread "
                          : stamp.who == Who::kBlock ? "several warps, among them thread "
                                                     : "several blocks, among them thread ";
  return who + std::to_string(stamp.thread) + " of block " + std::to_string(stamp.block);
}

void Executor::CheckCell(Region& region, std::size_t offset, AccessKind kind, const Stamp& now) {
  Cell& cell = region.cells[offset];
  const auto at = [&] { return region.name + " byte " + std::to_string(offset); };
  if (cell.pending) {
    Fail(FaultKind::kAsyncCopyPending, at() + " is the destination of a pending copy");
  }
  const bool atomics = kind == AccessKind::kAtomic && cell.write.atomic;
  if (!atomics && !IsBefore(cell.write, now)) {
    Fail(FaultKind::kRace, at() + (kind == AccessKind::kRead ? " is read" : " is written") +
                               ", written unordered by " + Describe(cell.write));
  }
  if (kind == AccessKind::kRead) {
    if (region.shared && !cell.written) {
      Fail(FaultKind::kSharedUninitialized, at() + " is read before anyone wrote it");
    }
    cell.read = IsBefore(cell.read, now) ? now : Join(cell.read, now);
    return;
  }
  if (!IsBefore(cell.read, now)) {
    Fail(FaultKind::kRace, at() + " is written, read unordered by " + Describe(cell.read));
  }
  cell.write = now;
  cell.written = true;
}

void Executor::Access(std::uintptr_t address, std::size_t bytes, AccessKind kind, bool aligned) {
  if (address - running_->stack < kStackBytes) return;
  Region* const region = memory_.Find(address);
  if (region == nullptr) {
    const bool read = kind == AccessKind::kRead;
    if (read && address - reinterpret_cast<std::uintptr_t>(parameters_) < parameter_bytes_) return;
    const auto constants = reinterpret_cast<std::uintptr_t>(&__executable_start);
    if (read && address - constants < reinterpret_cast<std::uintptr_t>(&data_start) - constants) {
      return;
    }
    Fail(FaultKind::kGlobalOutOfBounds, "an address in no allocation");
  }
  if (aligned && address % bytes != 0) {
    Fail(FaultKind::kMisaligned,
         region->name + " at an offset not a multiple of " + std::to_string(bytes));
  }
  const std::uintptr_t offset = address - region->first;
  if (offset >= region->bytes || bytes > region->bytes - offset) {
    Fail(region->shared ? FaultKind::kSharedOutOfBounds : FaultKind::kGlobalOutOfBounds,
         region->name + " of " + std::to_string(region->bytes) + " bytes at offset " +
             std::to_string(static_cast<std::ptrdiff_t>(offset)));
  }
  const Stamp now = Now(kind);
  for (std::size_t i = 0; i < bytes; ++i) CheckCell(*region, offset + i, kind, now);
}

void Executor::StartCopy(std::byte* to, const std::byte* from) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  Access(reinterpret_cast<std::uintptr_t>(from), 16, AccessKind::kRead, true);
  Access(address, 16, AccessKind::kWrite, true);
  Region* const region = memory_.Find(address);
  if (region == nullptr || !region->shared) {
    Fail(FaultKind::kSharedOutOfBounds, "the destination of a copy is not shared memory");
  }
  std::memset(to, Memory::kPoison, 16);
  for (std::size_t i = 0; i < 16; ++i) region->cells[address - region->first + i].pending = true;
  running_->open_copies.push_back({to, from});
}

void Executor::FinishCopies(std::size_t pending_groups_max) {
  Thread& self = *running_;
  for (; self.copy_groups.size() > pending_groups_max; self.copy_groups.pop_front()) {
    for (const AsyncCopy& copy : self.copy_groups.front()) {
      const auto address = reinterpret_cast<std::uintptr_t>(copy.to);
      Region* const region = memory_.Find(address);
      for (std::size_t i = 0; i < 16; ++i) {
        region->cells[address - region->first + i].pending = false;
      }
      Access(reinterpret_cast<std::uintptr_t>(copy.from), 16, AccessKind::kRead, true);
      Access(address, 16, AccessKind::kWrite, true);
      std::memcpy(copy.to, copy.from, 16);
    }
  }
}

void Executor::Fence() {
  Thread& self = *running_;
  self.fenced = true;
  self.fence_barriers = barriers_;
  Add(self.acquired, self.known);  // From here on for this thread, for the block after a barrier.
}

void Executor::AtomicOn(const void* address) {
  Thread& self = *running_;
  Knowledge& released = released_[address];
  if (self.fenced) {
    released[block_] = std::max(released[block_], self.fence_barriers);
    Add(known_, released);
  }
  Add(released, self.acquired);
}

}  // namespace cuda_harness
}  // namespace kvmill
