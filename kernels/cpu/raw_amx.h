// Raw rows with AMX, see raw_amx.cc.
#ifndef KVMILL_KERNELS_CPU_RAW_AMX_H_
#define KVMILL_KERNELS_CPU_RAW_AMX_H_

#include <cstddef>

#include "kernels/cpu/tile_method.h"

#if defined(__x86_64__)

namespace kvmill {

// Whether the CPU has the instructions, apart from the permission that tile_amx.cc asks for.
bool RawAmxIsSupported();

// TileMethod::prepare_raw and attend_raw. The tile registers are open (TileMethod::open).
void PrepareRawAmx(const float* query, std::size_t row_count, std::size_t dim, std::byte* to);
void AttendRawAmx(const RawStep& step);

}  // namespace kvmill

#endif  // __x86_64__
#endif  // KVMILL_KERNELS_CPU_RAW_AMX_H_
