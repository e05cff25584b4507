// A process at the other end of a UCX transport, for tests that stop and kill it.
//
//   transport_peer (plaintext|encrypted) [ADDRESS:PORT]
//
// Listens there, by default on loopback, and serves: `pull N` answers with N bytes, `sink` receives
// the request and answers, `hold` never answers. Reads commands from standard input:
//   offer                    prints an offer: address, key id and key in hexadecimal
//   dial ADDRESS ID KEY      connects to the node "server", incarnation 11, and prints how that
//   went push N, pull N           starts such a call on that connection
// Ends with its input.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/client/transport/transport_fixture.h"

namespace kvmill::testing {
namespace {

std::string Hex(absl::Span<const std::byte> bytes) { return absl::BytesToHexString(ToText(bytes)); }

class PeerHandler final : public TransportHandler {
 public:
  void OnCall(const ConnectionPtr& /*connection*/, std::unique_ptr<IncomingCall> call) override {
    const std::string header = ToText(call->header());
    std::uint64_t bytes = 0;
    if (header == "hold") {
      held_.push_back(std::move(call));
    } else if (header.starts_with("pull ") && absl::SimpleAtoi(header.substr(5), &bytes)) {
      if (data_.size() < bytes) data_.resize(bytes, std::byte{7});
      call->Respond({.payload = {absl::MakeConstSpan(data_).first(bytes)}});
    } else {
      ScriptedHandler::Echo(std::move(call));
    }
  }

 private:
  std::vector<std::unique_ptr<IncomingCall>> held_;
  std::vector<std::byte> data_;  // Of all answers: tests pull one size.
};

int Run(bool plaintext, const std::string& listen) {
  PeerHandler handler;
  TransportOptions options;
  options.self = {NodeIdentity::IdOf("peer"), static_cast<std::uint64_t>(getpid())};
  options.plaintext = plaintext;
  options.handler = &handler;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      MakeUcxTransport(options, {.listen = {listen}});
  if (!transport.ok()) {
    std::cerr << transport.status() << "\n";
    return 1;
  }
  ConnectionPtr connection;
  std::vector<std::byte> data;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command, address, id, key;
    words >> command;
    if (command == "offer") {
      const Offer offer = *(*transport)->MakeOffer(1);
      std::cout << offer.addresses[0] << " " << Hex(offer.key_id) << " " << Hex(offer.key) << " "
                << offer.node.incarnation << std::endl;
    } else if (command == "dial" && words >> address >> id >> key) {
      Offer offer;
      offer.addresses = {address};
      offer.node = {NodeIdentity::IdOf("server"), 11};
      id = absl::HexStringToBytes(id);
      key = absl::HexStringToBytes(key);
      std::memcpy(offer.key_id.data(), id.data(), offer.key_id.size());
      std::memcpy(offer.key.data(), key.data(), offer.key.size());
      Box<absl::StatusOr<ConnectionPtr>> result;
      (*transport)->Connect(offer, {.done = [&](absl::StatusOr<ConnectionPtr> made) {
                              result.Set(std::move(made));
                            }});
      while (!result.has()) usleep(1000);
      if (result.Get().ok()) connection = *result.Get();
      std::cout << (result.Get().ok() ? "connected" : result.Get().status().ToString())
                << std::endl;
    } else if (connection != nullptr && (command == "push" || command == "pull")) {
      std::uint64_t bytes = 0;
      words >> bytes;
      data.resize(bytes);
      Call call;
      call.timeout_nanos = 60 * kSecond;
      if (command == "push") {
        call.payload = {absl::MakeConstSpan(data)};
      } else {
        call.header = ToBytes("pull");
        call.place = [&data](const ResponseHead&, DestinationSpans* spans) {
          spans->push_back(absl::MakeSpan(data));
          return absl::OkStatus();
        };
      }
      call.done = [](absl::StatusOr<Response>) {};
      connection->Start(std::move(call));
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) {
  return kvmill::testing::Run(argc > 1 && std::strcmp(argv[1], "plaintext") == 0,
                              argc > 2 ? argv[2] : "127.0.0.1:0");
}
