// Which way a swap on a GPU takes: copy engines that move each piece over the bus, or kernels that gather pieces, so
// that the bus carries few large copies. Copy engines pay for each piece. Kernels pay for their launch, and beside
// compute they wait until a kernel of the engine leaves multiprocessors free.
#pragma once

#include <algorithm>
#include <cstdint>

#include "swap_params.h"

namespace weft {

enum class GpuWay { kAuto, kKernels, kCopyEngines };

// What one swap moves.
struct SwapSize {
  int64_t pieces;   // copies over the bus by copy engines
  int64_t extents;  // copies over the bus by kernels: ranges of consecutive slots
  int64_t bytes;
  int64_t staging_bytes;  // of all staging buffers
  Direction direction;
  bool beside_compute;
};

// Microseconds of `copies` over the bus. All constants here were fitted to an H100 on PCIe 5, with matrix products of
// 1.4 ms as the compute (docs/results/swap-kernel.md).
inline double crossing_us(int64_t copies, const SwapSize &size) {
  const bool small_in = size.direction == Direction::kIn && size.bytes < copies * (32 << 10);
  return (small_in ? 3.3 : 0.7) * static_cast<double>(copies) + static_cast<double>(size.bytes) / 55e3;
}

// Whether copy engines are faster than kernels: until all bytes have arrived, or, if the engine's stream waits for a
// swap-out, until that goes on. Kernels let it go on while the staging buffers still cross the bus.
inline bool copy_engines_win(const SwapSize &size) {
  const double bytes = static_cast<double>(size.bytes), staging = static_cast<double>(size.staging_bytes);
  double kernels_us = crossing_us(size.extents, size);
  if (size.beside_compute) {
    kernels_us += 1450 * (1 + bytes / (220 << 20));
  } else {
    if (size.direction == Direction::kOut) kernels_us *= 1 - std::min(1.0, staging / bytes);
    kernels_us += 25 + bytes / 1.7e6;
  }
  return crossing_us(size.pieces, size) <= kernels_us;
}

}  // namespace weft
