// Mapped blocks for Python. Internal to client/python.
#ifndef KVMILL_CLIENT_PYTHON_MAPPED_H_
#define KVMILL_CLIENT_PYTHON_MAPPED_H_

#include "client/kvmill_map.h"

namespace kvmill::python {

class Mapped {
 public:
  explicit Mapped(kvmill_mapped* mapped) : mapped_(mapped) {}
  ~Mapped() { kvmill_mapped_free(mapped_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  const kvmill_mapped* get() const { return mapped_; }

 private:
  kvmill_mapped* const mapped_;
};

}  // namespace kvmill::python

#endif  // KVMILL_CLIENT_PYTHON_MAPPED_H_
