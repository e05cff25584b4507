#include "storage/core/encode_scratch.h"

#include <memory>
#include <new>

#include "kernels/encode.h"

namespace kvmill {

absl::Span<std::byte> EncodeScratch(const TileFormat& format) {
  struct AlignedFree {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  static thread_local std::unique_ptr<std::byte, AlignedFree> scratch;
  static thread_local std::size_t scratch_bytes = 0;
  const std::size_t want = EncodeScratchBytes(format);
  if (scratch_bytes < want) {
    scratch.reset(static_cast<std::byte*>(::operator new (want, std::align_val_t{64})));
    scratch_bytes = want;
  }
  return absl::MakeSpan(scratch.get(), want);
}

}  // namespace kvmill
