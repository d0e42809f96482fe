// What one swap moves, as plain data. The host and the CUDA implementation take the same two structs.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// A run of bytes that every block has at the same place: a layer's page, or one head's keys and values in one layer.
// Block b's run starts at address + b * block_stride. Any strided KV layout is a list of such runs.
struct SwapPiece {
  uint64_t address;      // of block 0's run
  int64_t block_stride;  // bytes
  int64_t bytes;
  int64_t slot_offset;   // bytes from the start of a slot to the place of this run
};

// Where the engine's paged KV cache and the host pool are. Fixed for the life of an engine.
struct SwapLayout {
  std::vector<SwapPiece> pieces;  // in the order in which they lie in a slot, without gaps
  int64_t num_blocks;
  int64_t slot_bytes;             // sum of the pieces
  uint64_t pool;                  // address of slot 0, in host memory
  int64_t slot_stride;            // bytes, at least slot_bytes
  int64_t num_slots;
};

enum class Direction { kOut, kIn };  // out of the engine's cache, or into it

// One call: block blocks[i] goes to slot slots[i], or comes from it.
struct SwapBatch {
  Direction direction;
  const int64_t *blocks;
  const int64_t *slots;
  int64_t count;
};

}  // namespace weft
