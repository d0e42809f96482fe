// Validation: refuses layouts and batches with which a kernel would read or write memory outside of the blocks and
// slots named, or the same memory twice. The kernels themselves check nothing. Validation touches no memory of the
// engine.
#pragma once

#include "swap_params.h"

namespace weft {

// Makes the layout of `count` pieces. Each piece is three numbers: its address in block 0, the bytes from block to
// block, and its size in bytes. Throws std::invalid_argument if a piece is empty, leaves the address space, or overlaps
// another piece or the same piece of another block, and if the pool overlaps the cache.
SwapLayout make_layout(const int64_t *pieces, int64_t count, int64_t num_blocks, uint64_t pool, int64_t slot_stride,
                       int64_t num_slots);

// Throws std::invalid_argument if a block or a slot is out of range or is named twice. Takes time O(count), and a bit
// of memory for each number between the lowest and the highest.
void check_batch(const SwapLayout &layout, const SwapBatch &batch);

}  // namespace weft
