// Refuses layouts and batches that would read or write what they should not. No memory of the engine is touched here.
#pragma once

#include "swap_params.h"

namespace weft {

// The layout of `count` pieces, each three numbers: address in block 0, bytes from block to block, bytes. Throws
// std::invalid_argument if a piece is empty, leaves the address space, overlaps another block's or another piece's bytes,
// or if the pool overlaps the cache.
SwapLayout make_layout(const int64_t *pieces, int64_t count, int64_t num_blocks, uint64_t pool, int64_t slot_stride,
                       int64_t num_slots);

// Throws std::invalid_argument if a block or a slot is out of range or named twice. Time O(count + num_blocks / 64).
void check_batch(const SwapLayout &layout, const SwapBatch &batch);

}  // namespace weft
