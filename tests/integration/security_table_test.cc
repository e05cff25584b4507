// Who may do what: the table of docs/security.md, row by row, against real daemons on a network of
// their own. Each way in is tried by those who may and by those who may not.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <httplib.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/server_address.h"
#include "kvmill/v1/admin.grpc.pb.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "kvmill/v1/events.grpc.pb.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "kvmill/v1/ticket.grpc.pb.h"
#include "tests/integration/security_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uid_t kSomebody = 65533;
constexpr const char* kAdmitted = "127.0.0.1";
constexpr const char* kNotAdmitted = "127.0.0.2";

struct Row {
  std::string daemon, way, who, call, answer;
};

// What a call was answered with: a code, and what it says.
struct Said {
  std::string code, message;
};

// The rows of the table below the heading "Who may do what".
std::vector<Row> RowsOfTheDocument() {
  std::vector<Row> rows;
  const std::string text = ReadText(KVMILL_SOURCE_DIR "/docs/security.md");
  const std::size_t begin = text.find("\n## Who may do what\n");
  const std::size_t end = text.find("\n## ", begin + 1);
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text).substr(begin, end - begin), '\n')) {
    if (!absl::StartsWith(line, "|")) continue;
    std::vector<std::string> cells;
    for (const absl::string_view cell : absl::StrSplit(line, '|')) {
      cells.emplace_back(absl::StripAsciiWhitespace(cell));
    }
    EXPECT_EQ(cells.size(), 7u) << line;
    if (cells.size() != 7 || cells[1] == "daemon" || cells[1] == "---") continue;
    rows.push_back({cells[1], cells[2], cells[3], cells[4], cells[5]});
  }
  return rows;
}

const char* CodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::NOT_FOUND:
      return "NOT_FOUND";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    case grpc::StatusCode::FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    default:
      return "another code";
  }
}

grpc::Status CallOn(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& token, const std::string& door_token,
                    const std::string& boot_id) {
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  if (!token.empty()) call.AddMetadata("authorization", "Bearer " + token);
  if (!door_token.empty()) call.AddMetadata("kvmill-token", door_token);
  if (method == "Cache.Stat") {
    v1::StatReply reply;
    return v1::Cache::NewStub(channel)->Stat(&call, {}, &reply);
  }
  if (method == "Admin.Status") {
    v1::StatusReply reply;
    return v1::Admin::NewStub(channel)->Status(&call, {}, &reply);
  }
  if (method == "Data.Connect") {
    v1::ConnectRequest request;
    request.set_node_id(std::string(16, 'n'));
    v1::ConnectReply reply;
    return v1::Data::NewStub(channel)->Connect(&call, request, &reply);
  }
  if (method == "Events.Watch") {
    // OK once it says where it begins.
    v1::WatchReply reply;
    const auto reader = v1::Events::NewStub(channel)->Watch(&call, {});
    if (!reader->Read(&reply)) return reader->Finish();
    call.TryCancel();
    return grpc::Status::OK;
  }
  if (method == "Ticket.Revoke") {  // Of none.
    v1::RevokeTicketReply reply;
    return v1::Ticket::NewStub(channel)->Revoke(&call, {}, &reply);
  }
  if (absl::StartsWith(method, "Admin.Where")) {
    v1::WhereRequest request;
    request.mutable_namespace_()->set_name("n");
    request.set_key(std::string(32, 'k'));
    std::vector<std::string> words = absl::StrSplit(method, '`');  // "Admin.Where of `x`".
    if (words.size() == 3) request.set_tenant(words[1]);
    v1::WhereReply reply;
    return v1::Admin::NewStub(channel)->Where(&call, request, &reply);
  }
  EXPECT_EQ(method, "Peer.ListRuns");
  v1::ListRunsRequest request;
  request.set_incarnation(boot_id);
  v1::ListRunsReply reply;
  return v1::Peer::NewStub(channel)->ListRuns(&call, request, &reply);
}

// A TCP connection from one address of this host to another; -1 when nothing answers in a while.
int ConnectFrom(const char* source, const HostPort& to) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in own{};
  own.sin_family = AF_INET;
  inet_pton(AF_INET, source, &own.sin_addr);
  EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(to.port);
  inet_pton(AF_INET, to.host.c_str(), &target.sin_addr);
  connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  pollfd ready{fd, POLLOUT, 0};
  if (poll(&ready, 1, 300) == 1 && (ready.revents & (POLLERR | POLLHUP)) == 0) return fd;
  close(fd);
  return -1;
}

// How ZeroMQ's end there wants to know who reads: the mechanism of its greeting (ZMTP 3).
std::string MechanismOf(const HostPort& address) {
  const int fd = ConnectFrom(kAdmitted, address);
  if (fd < 0) return "no answer";
  std::string greeting(64, '\0');
  greeting[0] = '\xFF';
  greeting[9] = '\x7F';
  greeting[10] = '\3';
  std::memcpy(&greeting[12], "NULL", 4);
  EXPECT_EQ(send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL), 64);
  std::string theirs;
  char buffer[64];
  pollfd ready{fd, POLLIN, 0};
  while (theirs.size() < 32 && poll(&ready, 1, 30'000) == 1) {
    const ssize_t bytes = recv(fd, buffer, sizeof(buffer), 0);
    if (bytes <= 0) break;
    theirs.append(buffer, static_cast<std::size_t>(bytes));
  }
  close(fd);
  return theirs.size() < 32 ? "no greeting" : std::string(theirs.c_str() + 12);
}

class SecurityTableTest : public SecurityTest {
 protected:
  std::vector<std::string> ArgumentsOf(const std::string& daemon) {
    const std::string metrics = HasOwnNetwork() ? "0.0.0.0:0" : "127.0.0.1:0";
    const std::vector<std::string> ports = {"--ucx",       "127.0.0.1", "--events",
                                            "127.0.0.1:0", "--metrics", metrics};
    std::vector<std::string> arguments;
    if (daemon == "TLS") {
      arguments = TlsArguments();
    } else if (daemon == "TLS, `--tenants`") {
      arguments = TlsArguments({"--tenants", WriteTenants()});
    } else {
      EXPECT_EQ(daemon, "`--insecure`");
      arguments = TcpArguments();
      arguments.emplace_back("--insecure");
    }
    arguments.insert(arguments.end(), ports.begin(), ports.end());
    return arguments;
  }

  Said Answer(const Row& row) {
    if (row.call == "start") return CheckStart(row);
    if (row.way == "`--metrics`") return Scrape(row);
    if (row.way == "`--ucx`") return Reach(row);
    if (row.way == "`--events`") {
      EXPECT_EQ(row.who, "a process of the host");
      EXPECT_EQ(row.call, "subscribe");
      const std::string mechanism = MechanismOf(*ParseHostPort(
          absl::StrReplaceAll(ready_["events"].get<std::string>(), {{"tcp://", ""}})));
      return {mechanism == "NULL" ? "OK" : mechanism, ""};
    }
    if (row.way == "`PATH.door`") return Enter(row);
    if (row.way == "`--socket`") return OnSocket(row);
    EXPECT_THAT(row.way, ::testing::AnyOf("`--listen`", "`--admin`"));
    const Shown shown = ShownBy(row.who);
    const std::string address = ready_[row.way == "`--listen`" ? "listen" : "admin"];
    return SaidBy(CallOn(ChannelTo(address, shown), row.call, shown.token, "", BootId()));
  }

  static bool NeedsRights(const Row& row) {
    const bool elsewhere = absl::StrContains(row.who, "another host");
    const bool somebody = absl::StrContains(row.who, "another user");
    return (elsewhere && !HasOwnNetwork()) || (somebody && geteuid() != 0);
  }

 private:
  static Said SaidBy(const grpc::Status& status) {
    return {CodeName(status.error_code()), status.error_message()};
  }
  std::string BootId() const {
    return absl::HexStringToBytes(ready_["boot_id"].get<std::string>());
  }

  Shown ShownBy(const std::string& who) const {
    if (who == "certificate") return {true, client_, ""};
    if (who == "certificate of a node") return {true, node_, ""};
    if (who == "certificate of an administrator") return {true, operator_, ""};
    if (who == "certificate of no tenant") return {true, stranger_, ""};
    if (who == "certificate of another authority") return {true, foreign_, ""};
    if (who == "certificate that ended") return {true, over_, ""};
    if (who == "TLS without a certificate") return {true, {}, ""};
    if (who == "token") return {true, {}, kToken};
    if (who == "token of an administrator") return {true, {}, kOperatorToken};
    if (who == "wrong token") return {true, {}, "a-guess"};
    if (who == "token, no TLS") return {false, {}, kToken};
    EXPECT_EQ(who, "no TLS");
    return {false, {}, ""};
  }

  // Whether the daemon takes the options that stand as the way in.
  Said CheckStart(const Row& row) {
    std::vector<std::string> arguments = DefaultArguments();
    if (row.daemon == "TLS") {
      for (const std::string& argument : TlsArguments()) arguments.push_back(argument);
    } else {
      EXPECT_EQ(row.daemon, "no TLS");
    }
    const std::vector<std::string> words =
        absl::StrSplit(absl::StrReplaceAll(row.way, {{"`", ""}}), ' ');
    arguments.insert(arguments.end(), words.begin(), words.end());
    arguments.emplace_back("--check-config");
    DaemonProcess daemon(DaemonBinary(), arguments);
    const int code = daemon.WaitExit().code;
    return {code == 0 ? "OK" : "no start", daemon.standard_error()};
  }

  Said Scrape(const Row& row) {
    const std::vector<std::string> who = absl::StrSplit(row.who, ", ");
    httplib::Headers headers;
    if (who.size() > 1) {
      const std::map<std::string, const char*> tokens = {
          {"token", kToken},
          {"token of an administrator", kOperatorToken},
          {"token with `metrics: true`", kWatcherToken},
          {"wrong token", "a-guess"}};
      EXPECT_EQ(tokens.count(who[1]), 1u) << row.who;
      headers.emplace("Authorization", absl::StrCat("Bearer ", tokens.at(who[1])));
    }
    EXPECT_THAT(who[0], ::testing::AnyOf("a process of the host", "another host"));
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(who[0] == "another host" ? kElsewhere : kAdmitted, address.port);
    http.set_read_timeout(60, 0);
    const httplib::Result answer = http.Get(row.call.substr(4).c_str(), headers);
    if (!answer) return {"no answer", ""};
    std::string text = answer->body;
    if (answer->status == 200 && row.call == "GET /metrics") {
      const bool names = absl::StrContains(text, "{tenant=\"default\"}");
      EXPECT_NE(names, absl::StrContains(text, "{tenant=\"all tenants\"}")) << text;
      text = names ? "names" : "no names";
    }
    if (answer->status == 401) {
      EXPECT_EQ(answer->get_header_value("WWW-Authenticate"), "Bearer");
    }
    return {std::to_string(answer->status), text};
  }

  Said Reach(const Row& row) {
    const bool admitted = row.who == "a host that Data.Connect admitted";
    if (!admitted) {
      EXPECT_EQ(row.who, "a host that nobody admitted");
    }
    EXPECT_EQ(row.call, "connect");
    if (admitted) {
      const bool tls = ready_["tls"];
      const Shown shown = ShownBy(tls ? "certificate" : "no TLS");
      const grpc::Status status = CallOn(ChannelTo(ready_["listen"].get<std::string>(), shown),
                                         "Data.Connect", "", "", BootId());
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    const int fd = ConnectFrom(admitted ? kAdmitted : kNotAdmitted,
                               *ParseHostPort(ready_["ucx"].get<std::string>()));
    if (fd >= 0) close(fd);
    return {fd >= 0 ? "OK" : "no answer", ""};
  }

  // As another user, in a thread that becomes it, with all that it begins.
  std::unique_ptr<LocalPass> PassOfSomebody() const {
    std::unique_ptr<LocalPass> pass;
    std::thread([&] {
      EXPECT_EQ(syscall(SYS_setgroups, 0, nullptr), 0);
      EXPECT_EQ(syscall(SYS_setresgid, kSomebody, kSomebody, kSomebody), 0);
      EXPECT_EQ(syscall(SYS_setresuid, kSomebody, kSomebody, kSomebody), 0);
      pass = std::make_unique<LocalPass>(socket());
    }).join();
    return pass;
  }
  void SetLetIn(bool let_in) {
    LetOthersIn();
    if (!let_in) chmod((directory_ / "run").c_str(), 0750);
  }

  Said Enter(const Row& row) {
    EXPECT_EQ(row.call, "hello");
    absl::Status status;
    if (row.who == "the daemon's user") {
      status = LocalPass(socket()).status();
    } else {
      SetLetIn(row.who == "another user of the socket's group");
      if (row.who != "another user of the socket's group") {
        EXPECT_EQ(row.who, "another user");
      }
      status = PassOfSomebody()->status();
    }
    return {absl::StatusCodeToString(status.code()), std::string(status.message())};
  }

  Said OnSocket(const Row& row) {
    if (row.who == "another user of the socket's group") {
      SetLetIn(true);
      const std::map<std::string, std::string> commands = {
          {"Admin.Status", "status"}, {"Cache.Stat", "find"}, {"Ticket.Revoke", "revoke"}};
      EXPECT_EQ(commands.count(row.call), 1u) << row.call;
      const auto probe = Probe({commands.at(row.call), "s", "1"}, kSomebody);
      const std::string line = probe->ReadLine();
      if (probe->WaitExit().code == 0) return {"OK", line};
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(": ", 1));
      return {parts[0], parts.back()};
    }
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    const auto channel = grpc::CreateCustomChannel(absl::StrCat("unix:", socket()),
                                                   grpc::InsecureChannelCredentials(), arguments);
    std::unique_ptr<LocalPass> pass;
    if (row.who == "the daemon's user") pass = std::make_unique<LocalPass>(socket());
    if (row.who == "a token of the door of another user") {
      SetLetIn(true);
      pass = PassOfSomebody();
    }
    if (pass == nullptr) {
      EXPECT_EQ(row.who, "no token of the door");
    }
    return SaidBy(
        CallOn(channel, row.call, "", pass == nullptr ? "" : pass->token_hex(), BootId()));
  }
};

TEST_F(SecurityTableTest, TheTableOfTheDocumentIsTrue) {
  std::map<std::string, std::vector<Row>> rows;
  for (const Row& row : RowsOfTheDocument()) rows[row.daemon].push_back(row);
  ASSERT_EQ(rows.size(), 4u) << "daemons in docs/security.md";
  int left_out = 0;
  for (const auto& [daemon, of_daemon] : rows) {
    ASSERT_GE(of_daemon.size(), 5u);
    const bool runs = daemon != "no TLS";
    if (runs) {
      Start(ArgumentsOf(daemon));
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_EQ(ready_["tls"], daemon != "`--insecure`");
      Open("n", SmallSpec());  // There is a name to be told.
    }
    for (const Row& row : of_daemon) {
      if (NeedsRights(row)) {
        ++left_out;
        continue;
      }
      const std::vector<std::string> want = absl::StrSplit(row.answer, absl::MaxSplits(": ", 1));
      const Said got = Answer(row);
      const std::string name =
          absl::StrCat(row.daemon, ", ", row.way, ", ", row.who, ", ", row.call);
      EXPECT_EQ(got.code, want[0]) << name << ": " << got.message;
      if (want.size() > 1 && row.call == "GET /metrics" && want[0] == "200") {
        EXPECT_EQ(got.message, want[1]) << name;
      } else if (want.size() > 1) {
        EXPECT_THAT(got.message, HasSubstr(want[1])) << name;
      }
    }
    if (!runs) continue;
    // What was shown stays out of the log.
    for (const char* token : {kToken, kOperatorToken, kWatcherToken, "a-guess"}) {
      EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr(token)));
    }
    Kill();
  }
  if (left_out > 0) GTEST_SKIP() << left_out << " rows need root and a network of their own";
}

TEST_F(SecurityTableTest, WhatWasRefusedIsLogged) {
  Start(ArgumentsOf("TLS, `--tenants`"));
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(Answer({"", "`--admin`", "certificate", "Admin.Status", ""}).code, "PERMISSION_DENIED");
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("admin Status by ipv4:127.0.0.1:"));
  EXPECT_EQ(
      Answer({"", "`--metrics`", "a process of the host, wrong token", "GET /metrics", ""}).code,
      "401");
  EXPECT_THAT(
      daemon_->standard_error(),
      ::testing::ContainsRegex("a scrape is refused: the token is not one .*peer=127.0.0.1"));
}

}  // namespace

bool SecurityTest::HasOwnNetwork() {
  static const bool has = [] {
    if (unshare(CLONE_NEWNET) != 0) return false;
    const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ifreq up{};
    std::strcpy(up.ifr_name, "lo");
    up.ifr_flags = static_cast<short>(IFF_UP | IFF_LOOPBACK | IFF_RUNNING);
    ifreq address{};
    std::strcpy(address.ifr_name, "lo:1");
    sockaddr_in elsewhere{};
    elsewhere.sin_family = AF_INET;
    inet_pton(AF_INET, kElsewhere, &elsewhere.sin_addr);
    std::memcpy(&address.ifr_addr, &elsewhere, sizeof(elsewhere));
    const bool made = ioctl(fd, SIOCSIFFLAGS, &up) == 0 && ioctl(fd, SIOCSIFADDR, &address) == 0;
    close(fd);
    EXPECT_TRUE(made) << std::strerror(errno);
    return made;
  }();
  return has;
}

}  // namespace kvmill::testing
