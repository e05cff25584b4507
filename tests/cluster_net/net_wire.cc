// A network for tests: network namespaces and, in user space, the switch between them, whose links
// can be cut, delayed and made lossy one direction at a time, whatever the kernel has of tc.
//
//   net_wire PORTS SEED
//
// Makes PORTS namespaces without a name. In number N (from 1) are `lo` and `eth0`, a TAP device
// with the addresses 10.88.0.N/24 and fd88::N/64. Says on one line {"namespaces": [PATH, ...]}:
// nsenter --net=PATH runs something there. Then takes commands from standard input and answers each
// with "ok" once it holds:
//
//   link FROM TO up|down DELAY_US LOSS_PPM
//
// about frames from namespace FROM to namespace TO. Frames of a link keep their order. Ends at the
// end of its input, and when its parent dies; namespaces and devices go with it, and with whatever
// still runs in them. Needs root: exit code 77 when it may not.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/ipv6.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kSkipped = 77;
constexpr int kMtu = 9000;
constexpr std::size_t kFrameBytesMax = kMtu + 14 + 4;  // Ethernet header, VLAN tag.
constexpr std::size_t kQueuedBytesMax = std::size_t{64} << 20;
constexpr int kBatch = 64;  // Frames of a port before the others are looked at.

[[noreturn]] void Skip(const std::string& what) {
  std::fprintf(stderr, "net_wire: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(kSkipped);
}

std::int64_t NowNanos() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// --- One namespace ---

ifreq Named(const char* device) {
  ifreq request{};
  std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
  return request;
}

void Configure(int socket, unsigned long what, ifreq request, const char* name) {
  if (ioctl(socket, what, &request) != 0) Skip(name);
}

void SetUp(int socket, const char* device) {
  ifreq request = Named(device);
  if (ioctl(socket, SIOCGIFFLAGS, &request) != 0) Skip("SIOCGIFFLAGS");
  request.ifr_flags |= IFF_UP;
  Configure(socket, SIOCSIFFLAGS, request, "SIOCSIFFLAGS");
}

void SetIpv4(int socket, int number) {
  ifreq request = Named("eth0");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const auto set = [&](unsigned long what, const std::string& text, const char* name) {
    inet_pton(AF_INET, text.c_str(), &address.sin_addr);
    std::memcpy(&request.ifr_addr, &address, sizeof(address));
    Configure(socket, what, request, name);
  };
  set(SIOCSIFADDR, "10.88.0." + std::to_string(number), "SIOCSIFADDR");
  set(SIOCSIFNETMASK, "255.255.255.0", "SIOCSIFNETMASK");
}

void SetIpv6(int number) {
  // Nobody else has the address: it need not wait a second to find out.
  std::ofstream("/proc/sys/net/ipv6/conf/eth0/accept_dad") << 0;
  const int socket = ::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct {
    in6_addr address;
    std::uint32_t prefix_bits;
    int device;
  } request{};
  std::stringstream text;
  text << "fd88::" << std::hex << number;
  inet_pton(AF_INET6, text.str().c_str(), &request.address);
  request.prefix_bits = 64;
  request.device = static_cast<int>(if_nametoindex("eth0"));
  if (socket < 0 || ioctl(socket, SIOCSIFADDR, &request) != 0) Skip("an IPv6 address");
  close(socket);
}

struct Port {
  int tap = -1;
  int ns = -1;  // Keeps the namespace.
};

// Enters a new namespace, and leaves the process in it.
Port MakePort(int number) {
  if (unshare(CLONE_NEWNET) != 0) Skip("a network namespace");
  Port port;
  port.ns = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  port.tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (port.ns < 0 || port.tap < 0) Skip("/dev/net/tun");
  ifreq device = Named("eth0");
  device.ifr_flags = IFF_TAP | IFF_NO_PI;
  if (ioctl(port.tap, TUNSETIFF, &device) != 0) Skip("TUNSETIFF");
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) Skip("a socket");
  ifreq hardware = Named("eth0");
  hardware.ifr_hwaddr.sa_family = ARPHRD_ETHER;
  const unsigned char mac[6] = {2, 0, 0, 0, 0, static_cast<unsigned char>(number)};
  std::memcpy(hardware.ifr_hwaddr.sa_data, mac, sizeof(mac));
  Configure(socket, SIOCSIFHWADDR, hardware, "SIOCSIFHWADDR");
  ifreq mtu = Named("eth0");
  mtu.ifr_mtu = kMtu;
  Configure(socket, SIOCSIFMTU, mtu, "SIOCSIFMTU");
  SetUp(socket, "lo");
  SetUp(socket, "eth0");
  SetIpv4(socket, number);
  SetIpv6(number);
  close(socket);
  return port;
}

// --- The switch ---

struct Link {
  bool up = true;
  std::int64_t delay_ns = 0;
  std::uint32_t loss_ppm = 0;
  std::int64_t last_due_ns = 0;  // Of a frame under way: later ones do not overtake it.
};

class Switch {
 public:
  Switch(std::vector<Port> ports, std::uint64_t seed)
      : ports_(std::move(ports)), links_(ports_.size() * ports_.size()), random_(seed) {}

  int Run() {
    const int poll = epoll_create1(EPOLL_CLOEXEC);
    timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    const auto watch = [poll](int fd, std::uint64_t number) {
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u64 = number;
      return epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
    };
    const std::uint64_t timer = ports_.size(), input = timer + 1;
    for (std::size_t p = 0; p < ports_.size(); ++p) watch(ports_[p].tap, p);
    watch(timer_, timer);
    watch(STDIN_FILENO, input);
    while (true) {
      epoll_event events[16];
      const int count = epoll_wait(poll, events, 16, -1);
      for (int i = 0; i < count; ++i) {
        const std::uint64_t who = events[i].data.u64;
        if (who < timer) {
          Forward(who);
        } else if (who == timer) {
          DeliverDue();
        } else if (!TakeInput()) {
          return 0;
        }
      }
    }
  }

 private:
  Link& LinkOf(std::size_t from, std::size_t to) { return links_[from * ports_.size() + to]; }

  void Forward(std::size_t from) {
    for (int i = 0; i < kBatch; ++i) {
      char frame[kFrameBytesMax];
      const ssize_t bytes = read(ports_[from].tap, frame, sizeof(frame));
      if (bytes < 14) return;
      const auto to = static_cast<std::size_t>(static_cast<unsigned char>(frame[5]));
      if ((frame[0] & 1) == 0) {
        if (to >= 1 && to <= ports_.size()) Send(from, to - 1, frame, bytes);
        continue;
      }
      for (std::size_t other = 0; other < ports_.size(); ++other) {
        if (other != from) Send(from, other, frame, bytes);
      }
    }
  }

  void Send(std::size_t from, std::size_t to, const char* frame, ssize_t bytes) {
    Link& link = LinkOf(from, to);
    if (!link.up || (link.loss_ppm > 0 && random_() % 1'000'000 < link.loss_ppm)) return;
    const std::int64_t now = NowNanos();
    const std::int64_t due = std::max(now + link.delay_ns, link.last_due_ns);
    if (due <= now) {
      Deliver(to, frame, static_cast<std::size_t>(bytes));
      return;
    }
    if (queued_bytes_ > kQueuedBytesMax) return;
    link.last_due_ns = due;
    queued_bytes_ += static_cast<std::size_t>(bytes);
    queue_.emplace(due, Queued{from, to, std::string(frame, static_cast<std::size_t>(bytes))});
    SetTimer();
  }

  // A full device loses the frame, as a network does.
  void Deliver(std::size_t to, const char* frame, std::size_t bytes) {
    static_cast<void>(!write(ports_[to].tap, frame, bytes));
  }

  void DeliverDue() {
    std::uint64_t count = 0;
    static_cast<void>(!read(timer_, &count, sizeof(count)));
    while (!queue_.empty() && queue_.begin()->first <= NowNanos()) {
      const Queued& queued = queue_.begin()->second;
      if (LinkOf(queued.from, queued.to).up) {
        Deliver(queued.to, queued.frame.data(), queued.frame.size());
      }
      queued_bytes_ -= queued.frame.size();
      queue_.erase(queue_.begin());
    }
    SetTimer();
  }

  void SetTimer() {
    itimerspec next{};  // All zero: never.
    if (!queue_.empty()) {
      next.it_value.tv_sec = queue_.begin()->first / 1'000'000'000;
      next.it_value.tv_nsec = queue_.begin()->first % 1'000'000'000;
    }
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &next, nullptr);
  }

  // False at the end of the input.
  bool TakeInput() {
    char bytes[4096];
    const ssize_t count = read(STDIN_FILENO, bytes, sizeof(bytes));
    if (count <= 0) return false;
    input_.append(bytes, static_cast<std::size_t>(count));
    for (std::size_t end; (end = input_.find('\n')) != std::string::npos;) {
      std::puts(Obey(input_.substr(0, end)) ? "ok" : "what?");
      std::fflush(stdout);
      input_.erase(0, end + 1);
    }
    return true;
  }

  bool Obey(const std::string& line) {
    std::istringstream words(line);
    std::string verb, state;
    std::size_t from = 0, to = 0;
    std::int64_t delay_us = 0;
    std::uint32_t loss_ppm = 0;
    words >> verb >> from >> to >> state >> delay_us >> loss_ppm;
    const auto is_port = [this](std::size_t port) { return port >= 1 && port <= ports_.size(); };
    if (!words || verb != "link" || !is_port(from) || !is_port(to) || delay_us < 0 ||
        loss_ppm > 1'000'000 || (state != "up" && state != "down")) {
      return false;
    }
    Link& link = LinkOf(from - 1, to - 1);
    link.up = state == "up";
    link.delay_ns = delay_us * 1000;
    link.loss_ppm = loss_ppm;
    return true;
  }

  struct Queued {
    std::size_t from, to;
    std::string frame;
  };
  const std::vector<Port> ports_;
  std::vector<Link> links_;
  std::mt19937_64 random_;
  std::multimap<std::int64_t, Queued> queue_;  // By when they are due.
  std::size_t queued_bytes_ = 0;
  int timer_ = -1;
  std::string input_;
};

}  // namespace

int main(int argc, char** argv) {
  const int count = argc == 3 ? std::atoi(argv[1]) : 0;
  if (count < 1 || count > 100) {
    std::fprintf(stderr, "usage: net_wire PORTS SEED\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<Port> ports;
  std::string paths;
  for (int number = 1; number <= count; ++number) {
    ports.push_back(MakePort(number));
    paths += (number == 1 ? "\"/proc/" : ", \"/proc/") + std::to_string(getpid()) + "/fd/" +
             std::to_string(ports.back().ns) + "\"";
  }
  std::printf("{\"namespaces\": [%s]}\n", paths.c_str());
  std::fflush(stdout);
  return Switch(std::move(ports), std::strtoull(argv[2], nullptr, 10)).Run();
}
