// Events as Python has them. Internal to client/python. Everything here wants the GIL.
#ifndef KVMILL_CLIENT_PYTHON_WATCH_H_
#define KVMILL_CLIENT_PYTHON_WATCH_H_

#include "client/kvmill_events.h"
#include "client/python/native.h"

namespace kvmill::python {

// (snapshot_begin, snapshot_end, epoch or None, sequence, namespaces, events) of a batch: a
// namespace is (name, fingerprint, model, adapter_digest, hash_scheme, block_tokens), an event
// (kind, index of its namespace, key, parent, tier, from_tier, token_count).
py::tuple WatchBatchOf(const kvmill_result* result);

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_WATCH_H_
