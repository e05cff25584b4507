#include "service/transfers.h"

namespace kvmill {

std::vector<Transfer> TransfersOf(const ServiceContext& context, const DataPlane::Stats& data) {
  const ServiceCounters& counters = context.counters;
  std::vector<Transfer> transfers = {
      {FetchPathName(FetchPath::kMap), "shm", std::nullopt,
       counters.mapped_bytes.load(std::memory_order_relaxed)},
      {FetchPathName(FetchPath::kInline), "grpc",
       counters.inline_bytes_in.load(std::memory_order_relaxed),
       counters.inline_bytes_out.load(std::memory_order_relaxed)},
      {"pages", "shm", counters.page_bytes_in.load(std::memory_order_relaxed), 0}};
  if (context.reads_gpu_memory) {
    transfers.push_back(
        {"pages", "device_ipc", counters.gpu_page_bytes_in.load(std::memory_order_relaxed), 0});
  }
  for (const auto& [transport, bytes] : data.bytes) {
    transfers.push_back({FetchPathName(FetchPath::kUcx), transport, bytes.first, bytes.second});
  }
  return transfers;
}

}  // namespace kvmill
