#include "client/cli/top_screen.h"

#define NCURSES_NOMACROS  // Its macros are called move, clear, timeout.
#include <curses.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace kvmill::cli {
namespace {

constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP};
constexpr short kAlarmColor = 1;

volatile sig_atomic_t g_ended = 0;
SCREEN* g_screen = nullptr;

void OnEnding(int) { g_ended = 1; }

bool WantsColor() {
  const char* no_color = std::getenv("NO_COLOR");
  return has_colors() && (no_color == nullptr || *no_color == '\0');
}

}  // namespace

TopSignals::TopSignals() {
  g_ended = 0;
  sigset_t held;
  sigemptyset(&held);
  for (const int other : {SIGTSTP, SIGWINCH}) sigaddset(&held, other);
  for (const int ending : kEnding) {
    sigaddset(&held, ending);
    struct sigaction action = {};
    action.sa_handler = OnEnding;
    sigaction(ending, &action, nullptr);
  }
  pthread_sigmask(SIG_BLOCK, &held, &before_);
}

TopSignals::~TopSignals() {
  for (const int ending : kEnding) signal(ending, SIG_DFL);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

bool TopSignals::ended() const { return g_ended != 0; }

bool TopSignals::WaitReadable(const std::vector<int>& fds, absl::Duration timeout) const {
  std::vector<pollfd> polled;
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  const timespec time = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  if (ppoll(polled.data(), polled.size(), &time, &before_) <= 0) return true;
  return std::none_of(polled.begin(), polled.end(), [](const pollfd& p) {
    return (p.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
  });
}

std::unique_ptr<TopScreen> TopScreen::Open() {
  if (isatty(STDOUT_FILENO) == 0) return nullptr;
  g_screen = newterm(nullptr, stdout, stdin);
  if (g_screen == nullptr) return nullptr;
  std::unique_ptr<TopScreen> screen(new TopScreen);
  if (tigetstr("cup") == nullptr) return nullptr;
  cbreak();
  noecho();
  nodelay(stdscr, TRUE);
  curs_set(0);
  if (WantsColor()) {
    start_color();
    use_default_colors();
    init_pair(kAlarmColor, COLOR_RED, -1);
  }
  return screen;
}

TopScreen::~TopScreen() {
  endwin();
  delscreen(g_screen);
  g_screen = nullptr;
}

std::size_t TopScreen::width() const { return static_cast<std::size_t>(std::max(1, COLS)); }

void TopScreen::Draw(const std::vector<TopLine>& lines) {
  werase(stdscr);
  const int count = std::min(static_cast<int>(lines.size()), LINES);
  for (int i = 0; i < count; ++i) {
    const TopLine& line = lines[static_cast<std::size_t>(i)];
    attr_t style = A_NORMAL;
    if (line.style != TopLine::Style::kPlain) style = A_BOLD;
    if (line.style == TopLine::Style::kAlarm && WantsColor()) {
      style |= static_cast<attr_t>(COLOR_PAIR(kAlarmColor));
    }
    wattrset(stdscr, static_cast<int>(style));
    mvwaddnstr(stdscr, i, 0, line.text.c_str(), COLS);
  }
  wattrset(stdscr, A_NORMAL);
  wrefresh(stdscr);
}

bool TopScreen::TakeKeys() {
  for (int key = wgetch(stdscr); key != ERR; key = wgetch(stdscr)) {
    if (key == 'q' || key == 'Q') return true;
  }
  return false;
}

}  // namespace kvmill::cli
