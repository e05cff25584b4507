// The line on standard output with which a daemon says that it serves, and where.
//
// Its fields are a contract with whoever starts a daemon (docs/contracts.md): more may come, none
// may go or mean something else.
#ifndef KVMILL_SERVICE_READY_LINE_H_
#define KVMILL_SERVICE_READY_LINE_H_

#include <string>

#include "service/config.h"

namespace kvmill {

// What only a daemon that runs knows. Addresses have their real ports; empty: there is none.
struct ReadyFacts {
  std::string boot_id_hex;
  std::string device;
  std::string listen;
  std::string admin;
  std::string events;
  std::string events_replay;
  std::string metrics;
  std::string ucx;
};

// JSON, without a line end.
std::string FormatReadyLine(const Config& config, const ReadyFacts& facts);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_READY_LINE_H_
