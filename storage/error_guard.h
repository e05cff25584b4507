// What becomes of a namespace whose tiles lose too much: of each namespace windows of samples
// (storage/quantization_errors.h), and limits that their means are compared with.
//
// The first window whose mean of K or V is above its limit trips the namespace, once: it is logged,
// and from then on the action is what its stores meet. It stays tripped until another limit lets
// what was measured pass, or until the daemon ends: then it is measured again. What is stored
// already is served all the same.
#ifndef KVMILL_STORAGE_ERROR_GUARD_H_
#define KVMILL_STORAGE_ERROR_GUARD_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "storage/core/mutex.h"
#include "storage/core/namespace.h"
#include "storage/namespace_table.h"

namespace kvmill {

enum class GuardAction {
  kAlert,     // Nothing else: it goes on as before.
  kFallBack,  // Stores are refused with the namespace that is to be used instead.
  kRefuse,    // Stores are refused.
};

// Another namespace for the same K and V that loses less of them.
struct FallbackNamespace {
  std::string name;
  NamespaceSpec spec;
};
// A half of `spec` that loses too much has 4 bits where it had 2; one that had 4 makes all blocks
// raw. The name says so behind a '~', in place of an earlier one: chat, chat~k4v2, chat~k4v4,
// chat~raw. Nothing where no such name is short enough.
std::optional<FallbackNamespace> FallbackOf(absl::string_view name, const NamespaceSpec& spec,
                                            bool key_above, bool value_above);

// Thread-safe. Memory: some 300 bytes a namespace that is sampled.
class ErrorGuard {
 public:
  struct Options {
    GuardAction action = GuardAction::kAlert;
    // |decoded - stored| / |stored|; 0: no limit.
    double key_error_max = 0.6;
    double value_error_max = 0.6;
    std::uint32_t window_samples = 64;  // At least 1.
  };
  struct Trip {
    std::string tenant, name;
    double key_error = 0, value_error = 0;        // Means of the window.
    bool key_above = false, value_above = false;  // Which were above their limits then.
  };

  explicit ErrorGuard(const Options& options) : options_(options) {}

  // From now on. Namespaces whose measured errors are not above the limits any more are measured
  // again from the start, and take stores again.
  void SetOptions(const Options& options);
  // One sample's errors, both finite.
  void Observe(const OpenedNamespace& space, double key_error, double value_error);
  // OK; or FAILED_PRECONDITION with what was measured, the limit and what to do.
  absl::Status CheckStore(const OpenedNamespace& space) const;

  // Nothing: it has not tripped.
  std::optional<Trip> TripOf(NamespaceId id) const;
  std::vector<Trip> trips() const;  // In the order in which they came.
  GuardAction action() const {
    MutexLock lock(mu_);
    return options_.action;
  }

 private:
  struct Window {
    std::uint32_t samples = 0;
    double key_sum = 0, value_sum = 0;
    std::uint64_t trip = 0;  // Number of the trip; 0: none.
    Trip tripped;
  };
  std::string MeasuredLocked(const Trip& trip) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string AdviceLocked(const OpenedNamespace& space, const Trip& trip) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Of stores, which are many, hardly one ever has to look. Stale: it is as if it came before.
  std::atomic<std::uint32_t> tripped_count_{0};
  mutable Mutex mu_;
  Options options_ ABSL_GUARDED_BY(mu_);
  std::map<NamespaceId, Window> windows_ ABSL_GUARDED_BY(mu_);
  std::uint64_t trips_ ABSL_GUARDED_BY(mu_) = 0;  // So far.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ERROR_GUARD_H_
