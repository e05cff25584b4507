#include "service/unix_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr int kSendBufferBytes = 1 << 20;

absl::Status SystemError(absl::string_view what, const std::string& path, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat(what, " ", path));
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "socket path of ", path.size(), " bytes: want 1 to ", sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::Status MakeDirectory(const std::string& socket_path) {
  const std::filesystem::path directory = std::filesystem::path(socket_path).parent_path();
  std::error_code error;
  if (directory.empty() || std::filesystem::exists(directory, error)) return absl::OkStatus();
  std::filesystem::create_directories(directory.parent_path(), error);
  // mkdir applies the umask; the chmod does not.
  if (mkdir(directory.c_str(), 0750) != 0 && errno != EEXIST) {
    const absl::Status status = SystemError("mkdir", directory.string(), errno);
    return absl::Status(status.code(), absl::StrCat(status.message(),
                                                    "; give --socket PATH, in a folder where "
                                                    "this user may make one"));
  }
  if (chmod(directory.c_str(), 0750) != 0) return SystemError("chmod", directory.string(), errno);
  return absl::OkStatus();
}

// What the lock file has, or else new bytes, which are written there.
std::string HolderIn(int lock_fd) {
  constexpr std::size_t kBytes = 16;
  const auto all = static_cast<ssize_t>(kBytes);
  std::string holder(kBytes, '\0');
  if (pread(lock_fd, holder.data(), kBytes, 0) == all) return holder;
  if (getrandom(holder.data(), kBytes, 0) != all) return "";
  return pwrite(lock_fd, holder.data(), kBytes, 0) == all ? holder : "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Create(const std::string& path,
                                                                   Type type) {
  KVMILL_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  KVMILL_RETURN_IF_ERROR(MakeDirectory(path));
  std::unique_ptr<UnixListener> listener(new UnixListener());
  // The lock, not a trial connection, says whether a daemon lives there: it is released by any
  // death, and held by a stopped daemon too.
  const std::string lock_path = absl::StrCat(path, ".lock");
  listener->lock_fd_ = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (listener->lock_fd_ < 0) return SystemError("open", lock_path, errno);
  if (flock(listener->lock_fd_, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("socket ", path, ": another daemon is running there"));
  }
  listener->holder_ = HolderIn(listener->lock_fd_);
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("socket ", path, ": the path exists and is not a socket"));
    }
    if (unlink(path.c_str()) != 0) return SystemError("unlink", path, errno);
  }
  const int socket_type = type == Type::kStream ? SOCK_STREAM : SOCK_SEQPACKET;
  listener->listen_fd_ = socket(AF_UNIX, socket_type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener->listen_fd_ < 0) return SystemError("socket", path, errno);
  if (bind(listener->listen_fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
      0) {
    return SystemError("bind", path, errno);
  }
  if (type == Type::kStream) {
    // Connections inherit it. Nobody wants descriptors there, and closing some takes as long as
    // their sender likes. Linux before 6.16 does not know it.
    constexpr int kSoPassRights = 83;  // SO_PASSRIGHTS
    const int no = 0;
    setsockopt(listener->listen_fd_, SOL_SOCKET, kSoPassRights, &no, sizeof(no));
  }
  listener->path_ = path;  // From here on the destructor removes the socket.
  if (chmod(path.c_str(), 0660) != 0) return SystemError("chmod", path, errno);
  if (listen(listener->listen_fd_, 128) != 0) return SystemError("listen", path, errno);
  listener->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (listener->stop_fd_ < 0) return SystemError("eventfd", path, errno);
  return listener;
}

UnixListener::~UnixListener() {
  Stop();
  if (!path_.empty()) unlink(path_.c_str());
  for (int fd : {listen_fd_, stop_fd_, lock_fd_}) {
    if (fd >= 0) close(fd);
  }
}

void UnixListener::Start(Accepted accepted) {
  accepted_ = std::move(accepted);
  thread_ = std::thread([this] { Run(); });
}

void UnixListener::Stop() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  const ssize_t written = write(stop_fd_, &one, sizeof(one));
  static_cast<void>(written);  // It can only fail when the counter is already set.
  thread_.join();
}

void UnixListener::Run() {
  bool paused = false;  // Out of descriptors: wait a little instead of spinning.
  for (;;) {
    pollfd fds[2] = {{stop_fd_, POLLIN, 0}, {listen_fd_, POLLIN, 0}};
    const int count = poll(fds, paused ? 1 : 2, paused ? 100 : -1);
    paused = false;
    if (count < 0 && errno != EINTR) return;
    if (count > 0 && fds[0].revents != 0) return;
    if (count <= 0 || fds[1].revents == 0) continue;
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        LogWarning(absl::StrCat("socket ", path_, ": accept: ", std::strerror(errno)));
        paused = true;
      }
      continue;
    }
    ucred peer{};
    socklen_t bytes = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
      close(fd);
      continue;
    }
    // Fewer switches between daemon and client per megabyte. The kernel takes what it allows.
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
    accepted_(fd, peer.uid);
  }
}

}  // namespace kvmill
