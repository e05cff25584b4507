// The clients that the workers of a stress_client share.
#ifndef KVMILL_TESTS_STRESS_STRESS_CLIENTS_H_
#define KVMILL_TESTS_STRESS_STRESS_CLIENTS_H_

#include <memory>
#include <string>

#include "client/client.h"
#include "tests/stress/stress_model.h"

namespace kvmill::stress {

// The ways to the daemons that a process has, and its namespaces.
struct Clients {
  struct Addresses {
    std::string unix_path;
    std::string tcp;              // Of the same daemon. Empty: there is no remote client.
    std::string other_unix_path;  // Of another node of its cluster. Empty: none.
  };
  // Ends the process when it cannot.
  static std::unique_ptr<Clients> Connect(const Addresses& addresses);

  std::unique_ptr<Client> local;           // Inline over the socket, encoded by the daemon.
  std::unique_ptr<Client> ucx;             // The socket and UCX, encoded here.
  std::unique_ptr<Client> remote;          // TCP and UCX, encoded here; null without `tcp`.
  std::unique_ptr<Client> inline_encoded;  // Inline, encoded here.
  std::unique_ptr<Client> ucx_raw;         // UCX, encoded by the daemon.
  std::unique_ptr<Client> other;           // Of the other node, over its socket; may be null.
  ClientNamespace spaces[kSpaces];
};

}  // namespace kvmill::stress

#endif  // KVMILL_TESTS_STRESS_STRESS_CLIENTS_H_
