#include "kernels/cuda_formats.h"

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::Status ValidateCudaTileFormat(const TileFormat& format) {
  absl::Status valid = ValidateTileFormat(format);
  if (valid.ok() && format.key_bits == 3) {
    return absl::UnimplementedError(absl::StrCat(
        "format ", ToString(format), ": CUDA kernels have keys of 2 and 4 bits, not of 3"));
  }
  return valid;
}

}  // namespace kvmill
