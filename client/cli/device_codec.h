// Whole tensors to records on a device: what `kvmill encode --encoder cuda` does.
#ifndef KVMILL_CLIENT_CLI_DEVICE_CODEC_H_
#define KVMILL_CLIENT_CLI_DEVICE_CODEC_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/npy.h"
#include "kernels/encode.h"
#include "kernels/tile_format.h"
#include "storage/device/device.h"

namespace kvmill::cli {

// Encodes every head of every whole block. `records` has its size already: block after block, head
// after head. `results` gets as many entries, in that order. Takes a part of the device's memory
// that does not grow with the tensors.
absl::Status EncodeOnDevice(Device& device, const Tensor& k, const Tensor& v,
                            const TileFormat& format, std::string* records,
                            std::vector<EncodeResult>* results);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_DEVICE_CODEC_H_
