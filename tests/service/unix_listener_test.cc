#include "service/unix_listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "service/local_peers.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr uid_t kSomebody = 65534;

// A connection, or -errno.
int Connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  const int error = errno;
  close(fd);
  return -error;
}

mode_t ModeOf(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

class UnixListenerTest : public testing::Test {
 protected:
  UnixListenerTest() {
    std::string pattern = testing::TempDir() + "kvmill-socket-XXXXXX";
    base_ = mkdtemp(pattern.data());
    // The directory under test decides who comes in, not this one.
    EXPECT_EQ(chmod(base_.c_str(), 0755), 0);
  }
  ~UnixListenerTest() override {
    listener_.reset();
    for (const int fd : accepted_fds_) close(fd);
    std::filesystem::remove_all(base_);
  }

  std::string directory() const { return base_ + "/run"; }
  std::string path() const { return directory() + "/kvmill.sock"; }

  void Listen() {
    auto listener = UnixListener::Create(path());
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  void Start() {
    listener_->Start([this](int fd, uid_t uid) {
      MutexLock lock(mu_);
      accepted_fds_.push_back(fd);
      accepted_uids_.push_back(uid);
      changed_.NotifyAll();
    });
  }
  // The uid of connection number `n`, once it is there.
  uid_t AcceptedUid(std::size_t n) {
    MutexLock lock(mu_);
    while (accepted_uids_.size() <= n) {
      if (!changed_.WaitFor(mu_, std::chrono::seconds(10))) {
        ADD_FAILURE() << "connection " << n << " was not accepted";
        return static_cast<uid_t>(-1);
      }
    }
    return accepted_uids_[n];
  }
  // What Connect says when somebody else calls it: 0 or -errno.
  int ConnectAsSomebody() {
    const pid_t child = fork();
    if (child == 0) {
      if (setgid(kSomebody) != 0 || setuid(kSomebody) != 0) _exit(255);
      const int fd = Connect(path());
      _exit(fd >= 0 ? 0 : -fd);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_NE(WEXITSTATUS(status), 255) << "cannot become another user";
    return -WEXITSTATUS(status);
  }

  std::unique_ptr<UnixListener> listener_;

 private:
  std::string base_;
  Mutex mu_;
  CondVar changed_;
  std::vector<int> accepted_fds_ ABSL_GUARDED_BY(mu_);
  std::vector<uid_t> accepted_uids_ ABSL_GUARDED_BY(mu_);
};

TEST_F(UnixListenerTest, TheHolderStaysFromOneToTheNext) {
  Listen();
  const std::string holder = listener_->holder();
  EXPECT_EQ(holder.size(), 16u);
  EXPECT_NE(holder, std::string(16, '\0'));
  listener_.reset();
  Listen();
  EXPECT_EQ(listener_->holder(), holder);
  listener_.reset();
  // A lock file of an earlier version has none; nor has one that was cut off.
  std::filesystem::resize_file(path() + ".lock", 7);
  Listen();
  EXPECT_EQ(listener_->holder().size(), 16u);
  EXPECT_NE(listener_->holder(), holder);
  const std::string other = listener_->holder();
  listener_.reset();
  Listen();
  EXPECT_EQ(listener_->holder(), other);
}

TEST_F(UnixListenerTest, DirectoryAndSocketHaveTheirModesWhateverTheUmask) {
  for (const mode_t mask : {mode_t{0}, mode_t{077}}) {
    const mode_t before = umask(mask);
    Listen();
    umask(before);
    EXPECT_EQ(ModeOf(directory()), 0750u) << "umask " << mask;
    EXPECT_EQ(ModeOf(path()), 0660u) << "umask " << mask;
    EXPECT_EQ(ModeOf(path() + ".lock"), 0600u) << "umask " << mask;
    listener_.reset();
    std::filesystem::remove_all(directory());
  }
}

TEST_F(UnixListenerTest, ADirectoryThatIsThereKeepsItsMode) {
  ASSERT_EQ(mkdir(directory().c_str(), 0700), 0);
  Listen();
  EXPECT_EQ(ModeOf(directory()), 0700u);
}

TEST_F(UnixListenerTest, TakesNoDescriptorsWhereTheKernelCanSaySo) {
  Listen();
  const int early = Connect(path());
  ASSERT_GE(early, 0);
  Start();
  EXPECT_EQ(AcceptedUid(0), getuid());
  int allowed = 0;
  socklen_t bytes = sizeof(allowed);
  constexpr int kSoPassRights = 83;
  const bool known = getsockopt(early, SOL_SOCKET, kSoPassRights, &allowed, &bytes) == 0;
  if (!known) {
    close(early);
    GTEST_SKIP() << "this kernel does not know SO_PASSRIGHTS";
  }
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  EXPECT_EQ(sendmsg(early, &message, MSG_NOSIGNAL), 1);
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &early, sizeof(early));
  EXPECT_EQ(sendmsg(early, &message, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPERM);
  close(early);
}

TEST_F(UnixListenerTest, HandsOverEveryConnectionWithItsUid) {
  Listen();
  const int early = Connect(path());  // Waits until Start.
  ASSERT_GE(early, 0);
  Start();
  EXPECT_EQ(AcceptedUid(0), getuid());
  const int late = Connect(path());
  ASSERT_GE(late, 0);
  EXPECT_EQ(AcceptedUid(1), getuid());
  close(early);
  close(late);
}

TEST_F(UnixListenerTest, SomebodyElseIsKeptOutByTheDirectoryAndKnownByUidWhenLetIn) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Listen();
  Start();
  EXPECT_EQ(ConnectAsSomebody(), -EACCES);
  ASSERT_EQ(chmod(directory().c_str(), 0755), 0);
  EXPECT_EQ(ConnectAsSomebody(), -EACCES) << "the socket's own mode";
  ASSERT_EQ(chmod(path().c_str(), 0666), 0);
  EXPECT_EQ(ConnectAsSomebody(), 0);
  EXPECT_EQ(AcceptedUid(0), kSomebody);
}

TEST_F(UnixListenerTest, RefusesAPathThatIsTakenAndReplacesALeftOver) {
  Listen();
  const absl::Status second = UnixListener::Create(path()).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("another daemon is running there"));
  const int fd = Connect(path());
  EXPECT_GE(fd, 0) << "the refused one must not touch the socket";
  close(fd);
  listener_.reset();
  EXPECT_FALSE(std::filesystem::exists(path()));

  // As a killed daemon leaves it: a socket that nobody listens on.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path().data(), path().size());
  const int left_over = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(left_over, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(left_over);
  EXPECT_EQ(Connect(path()), -ECONNREFUSED);
  Listen();
  const int again = Connect(path());
  EXPECT_GE(again, 0);
  close(again);
}

TEST_F(UnixListenerTest, AFileThatIsNoSocketIsLeftAlone) {
  ASSERT_EQ(mkdir(directory().c_str(), 0750), 0);
  std::ofstream(path()) << "precious";
  const absl::Status status = UnixListener::Create(path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path() + ": the path exists"));
  EXPECT_EQ(std::filesystem::file_size(path()), 8u);
}

TEST_F(UnixListenerTest, BadPathsAreNamedWithTheLimit) {
  const absl::Status empty = UnixListener::Create("").status();
  EXPECT_EQ(empty.code(), absl::StatusCode::kInvalidArgument);
  const absl::Status longer = UnixListener::Create("/" + std::string(107, 'x')).status();
  EXPECT_EQ(longer.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(longer.message()), HasSubstr("108 bytes: want 1 to 107"));
}

TEST(LocalPeersTest, AdminIsForTheOwnUidAndRootOnTheSocketOnly) {
  LocalPeers peers;
  peers.Connected(7, 1000);
  peers.Connected(8, 0);
  peers.Connected(9, 1001);
  const AdminGate gate(peers, 1000);
  EXPECT_TRUE(gate.Check("fd:7", true).ok());
  EXPECT_TRUE(gate.Check("fd:8", true).ok());
  EXPECT_THAT(std::string(gate.Check("fd:9", true).message()), HasSubstr("not for uid 1001"));
  EXPECT_EQ(gate.Check("fd:9", true).code(), absl::StatusCode::kPermissionDenied);
  for (const char* peer : {"fd:10", "fd:", "fd:7x", "ipv4:127.0.0.1:7", "unix:/x", ""}) {
    EXPECT_EQ(gate.Check(peer, true).code(), absl::StatusCode::kPermissionDenied) << peer;
  }
  peers.Connected(9, 1000);  // The descriptor was used again.
  EXPECT_TRUE(gate.Check("fd:9", true).ok());
  EXPECT_TRUE(gate.Check("fd:9", false).ok()) << "the uid says enough";
  EXPECT_TRUE(AdminGate().Check("ipv4:127.0.0.1:7", true).ok());
  EXPECT_EQ(AdminGate().Check("ipv4:127.0.0.1:7", false).code(),
            absl::StatusCode::kPermissionDenied);
}

}  // namespace
}  // namespace kvmill
