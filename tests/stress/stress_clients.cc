#include "tests/stress/stress_clients.h"

namespace kvmill::stress {

std::unique_ptr<Clients> Clients::Connect(const Addresses& addresses) {
  auto clients = std::make_unique<Clients>();
  const auto make = [](const std::string& address, DataPath path, EncodeIn encode_in) {
    Client::Options options;
    options.address = address;
    options.timeout = absl::Seconds(30);
    options.path = path;
    options.encode_in = encode_in;
    auto client = Client::Create(options);
    if (!client.ok()) Wrong(client.status().ToString());
    return *std::move(client);
  };
  const std::string local = "unix:" + addresses.unix_path;
  clients->local = make(local, DataPath::kInline, EncodeIn::kDaemon);
  clients->ucx = make(local, DataPath::kUcx, EncodeIn::kClient);
  clients->inline_encoded = make(local, DataPath::kInline, EncodeIn::kClient);
  clients->ucx_raw = make(local, DataPath::kUcx, EncodeIn::kDaemon);
  if (!addresses.tcp.empty()) {
    clients->remote = make(addresses.tcp, DataPath::kUcx, EncodeIn::kClient);
  }
  if (!addresses.other_unix_path.empty()) {
    clients->other =
        make("unix:" + addresses.other_unix_path, DataPath::kInline, EncodeIn::kDaemon);
  }
  for (const Space space : {Space::kTiles, Space::kRaw}) {
    for (Client* client : {clients->local.get(), clients->ucx.get(), clients->inline_encoded.get(),
                           clients->ucx_raw.get(), clients->remote.get(), clients->other.get()}) {
      if (client == nullptr) continue;
      auto ns = client->OpenNamespace(NameOf(space), SpecOf(space));
      if (!ns.ok()) Wrong("open: " + ns.status().ToString());
      clients->spaces[static_cast<std::size_t>(space)] = *std::move(ns);
    }
  }
  return clients;
}

}  // namespace kvmill::stress
