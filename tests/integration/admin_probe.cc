// Makes one admin call and exits with its status code: for tests that need another user's process.
//   admin_probe ADDRESS
#include <cstdio>

#include "client/client.h"

int main(int argc, char** argv) {
  kvmill::Client::Options options;
  options.address = argc > 1 ? argv[1] : "";
  options.timeout = absl::Seconds(30);
  const auto client = kvmill::Client::Create(options);
  if (!client.ok()) return 100;
  const absl::Status status = (*client)->Status().status();
  std::puts(status.ToString().c_str());
  return static_cast<int>(status.code());
}
