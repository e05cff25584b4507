#include "client/cli/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvmill::cli {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int Close() {
    const int result = close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

absl::Status SystemError(absl::string_view verb, const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat("cannot ", verb, " ", path, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (file.get() < 0 || fstat(file.get(), &info) != 0) return SystemError("read", path);
  std::string bytes;
  if (S_ISREG(info.st_mode)) bytes.reserve(static_cast<std::size_t>(info.st_size));
  std::string buffer(std::size_t{1} << 20, '\0');
  for (;;) {
    const ssize_t got = read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError("read", path);
    if (got == 0) return bytes;
    bytes.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

absl::Status WriteFile(const std::string& path, absl::Span<const absl::string_view> pieces) {
  struct stat info {};
  // A pipe or a device (/dev/stdout, /dev/null) is written in place.
  const bool in_place = stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);
  const std::string target = in_place ? path : absl::StrCat(path, ".tmp", getpid());
  FileDescriptor file(open(target.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) return SystemError("write", path);
  const auto give_up = [&] {
    absl::Status status = SystemError("write", path);
    if (!in_place) unlink(target.c_str());
    return status;
  };
  for (const absl::string_view piece : pieces) {
    std::size_t done = 0;
    while (done < piece.size()) {
      const ssize_t put = write(file.get(), piece.data() + done, piece.size() - done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return give_up();
      done += static_cast<std::size_t>(put);
    }
  }
  if (file.Close() != 0) return give_up();
  if (!in_place && rename(target.c_str(), path.c_str()) != 0) return give_up();
  return absl::OkStatus();
}

bool FileExists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

}  // namespace kvmill::cli
