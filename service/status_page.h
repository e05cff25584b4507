// The page at / of the metrics port: live tiers, hit rate and compression, peers, sessions, sampled
// namespaces, and how much fits into a memory. Everything in it comes from /metrics; it asks nobody
// else. Made of status_page.html by CMake.
#ifndef KVMILL_SERVICE_STATUS_PAGE_H_
#define KVMILL_SERVICE_STATUS_PAGE_H_

namespace kvmill {

extern const char kStatusPage[];

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STATUS_PAGE_H_
