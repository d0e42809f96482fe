// Which way a swap on a GPU takes: copy engines that move every piece over the bus, or kernels that gather the pieces, so
// that the bus carries few large copies. Copy engines pay for each piece. Kernels pay for their launch, and beside
// compute they wait until a kernel of the engine leaves multiprocessors free.
#pragma once

#include <cstdint>

#include "swap_params.h"

namespace weft {

enum class GpuWay { kAuto, kKernels, kCopyEngines };

// What one swap moves.
struct SwapSize {
  int64_t pieces;   // copies over the bus by copy engines
  int64_t extents;  // copies over the bus by kernels: ranges of consecutive slots
  int64_t bytes;
  Direction direction;
  bool beside_compute;
};

// Microseconds of `copies` over the bus. The constants were fitted to an H100 on PCIe 5 (docs/results/swap-kernel.md).
inline double crossing_us(int64_t copies, const SwapSize &size) {
  const bool small_in = size.direction == Direction::kIn && size.bytes < copies * (64 << 10);
  return (small_in ? 3.3 : 0.5) * static_cast<double>(copies) + static_cast<double>(size.bytes) / 55e3;
}

// Whether copy engines are faster than kernels.
inline bool copy_engines_win(const SwapSize &size) {
  const double bytes = static_cast<double>(size.bytes);
  const double kernels_us = size.beside_compute ? 1450 * (1 + bytes / (64 << 20)) : 25 + bytes / 1.4e6;
  return crossing_us(size.pieces, size) <= crossing_us(size.extents, size) + kernels_us;
}

}  // namespace weft
