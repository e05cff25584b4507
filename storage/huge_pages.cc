#include "storage/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>

#include "storage/page_pool.h"

namespace kvmill {
namespace {

#ifdef MADV_COLLAPSE
constexpr int kCollapse = MADV_COLLAPSE;
#else
constexpr int kCollapse = 25;  // Newer than the C library's headers.
#endif

int Advise(std::byte* begin, std::size_t bytes, int advice) {
  int result = 0;
  do {
    result = madvise(begin, bytes, advice);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

}  // namespace

int GatherHugePage(std::byte* extent) {
  // The kernel gathers around what is there. One small page is enough, and costs a fraction of
  // touching them all.
  const int touched = Advise(extent, 1, MADV_POPULATE_WRITE);
  return touched != 0 ? touched : Advise(extent, kExtentBytes, kCollapse);
}

}  // namespace kvmill
