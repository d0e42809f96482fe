// What one swap moves, as plain data: the layout of the engine's KV cache and of the host pool, which is fixed, and a
// batch of blocks and slots, which differs from call to call. The host and the CUDA implementation take the same two
// structs. A block is the engine's unit of KV cache, a slot is the part of the pool that holds one block, and a piece
// is a part of a block that is contiguous in the engine's cache.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// Contiguous bytes that every block has: a layer's page, or one head's keys and values in one layer. The piece of block
// b starts at address + b * block_stride. Any strided KV layout is a list of such pieces.
struct SwapPiece {
  uint64_t address;      // of the piece in block 0
  int64_t block_stride;  // bytes from block to block
  int64_t bytes;         // size of the piece
  int64_t slot_offset;   // bytes from the start of a slot to this piece
};

// Where the engine's paged KV cache and the host pool lie. It does not change as long as the engine lives.
struct SwapLayout {
  std::vector<SwapPiece> pieces;  // in their order in a slot, which has no gaps
  int64_t num_blocks;
  int64_t slot_bytes;             // sum of the pieces' bytes
  uint64_t pool;                  // address of slot 0, in host memory
  int64_t slot_stride;            // bytes, at least slot_bytes
  int64_t num_slots;
};

enum class Direction { kOut, kIn };  // from the engine's cache to the pool, or back

// The blocks of one call: block blocks[i] goes to slot slots[i], or comes from there.
struct SwapBatch {
  Direction direction;
  const int64_t *blocks;
  const int64_t *slots;
  int64_t count;
};

}  // namespace weft
