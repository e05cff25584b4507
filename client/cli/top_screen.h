// The terminal of `kvmill top`: an alternate screen, keys, changes of size, and what was there
// before given back at the end, whatever ends the program but SIGKILL.
#ifndef KVMILL_CLIENT_CLI_TOP_SCREEN_H_
#define KVMILL_CLIENT_CLI_TOP_SCREEN_H_

#include <signal.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "client/cli/top_frame.h"

namespace kvmill::cli {

// SIGINT, SIGTERM and SIGHUP become a wish to end. They, SIGTSTP and SIGWINCH reach this thread in
// WaitReadable alone, and no thread that is started later: what their handlers do to a terminal
// meets no half-drawn frame. One at a time; make it before any other thread.
class TopSignals {
 public:
  TopSignals();
  ~TopSignals();
  TopSignals(const TopSignals&) = delete;
  TopSignals& operator=(const TopSignals&) = delete;

  // Until one of `fds` is readable (negative ones are ignored), `timeout` is over, or a signal
  // came. False: nothing will ever come from one of them, since the terminal is gone.
  bool WaitReadable(const std::vector<int>& fds, absl::Duration timeout) const;
  bool ended() const;

 private:
  sigset_t before_;  // The thread's mask.
};

// One at a time.
class TopScreen {
 public:
  // Takes the terminal of standard output. Null: it is none, or one that cannot move a cursor.
  // After TopSignals.
  static std::unique_ptr<TopScreen> Open();
  ~TopScreen();
  TopScreen(const TopScreen&) = delete;
  TopScreen& operator=(const TopScreen&) = delete;

  std::size_t width() const;
  void Draw(const std::vector<TopLine>& lines);
  // Looks at keys and at the size; true when the user wants to leave.
  bool TakeKeys();

 private:
  TopScreen() = default;
};

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_TOP_SCREEN_H_
