// The step of a drain in which other nodes take over the blocks that only this one has.
//
// For node.cc, whose Drain says when: this node still answers, since those that take blocks over
// fetch them here. How much of the time goes to it is in drain_handover.cc and may change, as long
// as calls in flight get the rest; how it is done is in service/cluster/handover.h.
#ifndef KVMILL_SERVICE_DRAIN_HANDOVER_H_
#define KVMILL_SERVICE_DRAIN_HANDOVER_H_

#include <chrono>

#include "service/cluster_blocks.h"
#include "service/leaving.h"
#include "storage/core/clock.h"

namespace kvmill {

// Returns well before `deadline`, that of the drain; tells `leaving`, and logs, how many blocks
// other nodes have then, how many none has, and how many nobody was asked to take. `has_disk`: what
// no other node has comes back with this one.
void HandOver(ClusterBlocks& blocks, const Clock& clock,
              std::chrono::system_clock::time_point deadline, bool has_disk, Leaving& leaving);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DRAIN_HANDOVER_H_
