// The process of one tensor-parallel rank of the reference engine: engine_worker SOCKET_FD
#include <cstdlib>

#include "tests/engine/worker.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  return kvmill::engine::RunWorkerProcess(std::atoi(argv[1]));
}
