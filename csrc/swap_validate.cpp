#include "swap_validate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

using Wide = __int128;  // addresses and their products do not overflow in it

[[noreturn]] void refuse(const std::string &what) { throw std::invalid_argument(what); }

// `count` runs of `bytes` bytes, the first at `first`, one every `stride` bytes.
struct Runs {
  Wide first, stride, bytes, count;
  Wide end() const { return first + (count - 1) * stride + bytes; }
};

Wide floor_div(Wide a, Wide b) { return a / b - (a % b < 0); }

// Whether any run of `a` shares a byte with [begin, end).
bool touches(const Runs &a, Wide begin, Wide end) {
  // Run k ends after `begin` from this k on; of those the first begins lowest.
  const Wide k = std::max<Wide>(0, floor_div(begin - a.first - a.bytes, a.stride) + 1);
  return k < a.count && a.first + k * a.stride < end;
}

bool overlap(const Runs &a, const Runs &b) {
  if (a.end() <= b.first || b.end() <= a.first) return false;
  if (a.stride == b.stride) {
    // Run j of b meets run k of a if d = j - k gives a.first - b.bytes < b.first + d * stride < a.first + a.bytes.
    const Wide d = floor_div(a.first - b.bytes - b.first, a.stride) + 1;  // the least such d on the left side
    const Wide low = std::max<Wide>(d, 1 - a.count);
    return low < b.count && b.first + low * a.stride < a.first + a.bytes;
  }
  for (Wide k = 0; k < b.count; ++k) {
    if (touches(a, b.first + k * b.stride, b.first + k * b.stride + b.bytes)) return true;
  }
  return false;
}

std::string number(int64_t value) { return std::to_string(value); }

void check_ids(const char *what, const int64_t *ids, int64_t count, int64_t limit) {
  std::vector<uint64_t> seen(static_cast<size_t>(limit / 64 + 1));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i];
    if (id < 0 || id >= limit) {
      refuse(std::string(what) + " " + number(id) + " is out of range: there are " + number(limit) +
             ". Pass ids from 0 to " + number(limit - 1) + ".");
    }
    uint64_t &word = seen[static_cast<size_t>(id) / 64];
    const uint64_t bit = uint64_t{1} << (id % 64);
    if (word & bit) {
      refuse(std::string(what) + " " + number(id) + " appears twice in one call. Pass each at most once: the copies "
             "run in no particular order.");
    }
    word |= bit;
  }
}

void check_layout(const SwapLayout &layout) {
  if (layout.pieces.empty() || layout.num_blocks < 1 || layout.num_slots < 1) {
    refuse("there is nothing to swap: " + number(static_cast<int64_t>(layout.pieces.size())) + " pieces, " +
           number(layout.num_blocks) + " blocks, " + number(layout.num_slots) + " slots. Each must be at least 1.");
  }
  if (layout.slot_stride < layout.slot_bytes) {
    refuse("a slot of the pool has " + number(layout.slot_stride) + " bytes and a block needs " +
           number(layout.slot_bytes) + ". Make the pool with slot_bytes=" + number(layout.slot_bytes) + ".");
  }
  const Wide space = Wide{1} << 63;
  const Runs pool{layout.pool, layout.slot_stride, layout.slot_stride, layout.num_slots};
  if (layout.pool == 0 || pool.end() > space) refuse("the pool does not lie in memory. Pass an open pool.");

  std::vector<Runs> runs;
  for (const SwapPiece &piece : layout.pieces) {
    const Runs run{piece.address, std::max<Wide>(piece.block_stride, 1), piece.bytes, layout.num_blocks};
    if (piece.address == 0 || piece.bytes < 1 || piece.block_stride < 0 || run.end() > space) {
      refuse("a piece of " + number(piece.bytes) + " bytes every " + number(piece.block_stride) +
             " bytes does not lie in memory. Describe the tensors as they were registered.");
    }
    if (layout.num_blocks > 1 && piece.block_stride < piece.bytes) {
      refuse("blocks overlap: a piece of " + number(piece.bytes) + " bytes every " + number(piece.block_stride) +
             " bytes. Pass a cache whose blocks have their own memory.");
    }
    if (touches(run, pool.first, pool.end())) {
      refuse("the pool overlaps the cache. Give the pool memory of its own.");
    }
    runs.push_back(run);
  }
  std::sort(runs.begin(), runs.end(), [](const Runs &a, const Runs &b) { return a.first < b.first; });
  for (size_t i = 0; i < runs.size(); ++i) {
    for (size_t j = i + 1; j < runs.size() && runs[j].first < runs[i].end(); ++j) {
      if (overlap(runs[i], runs[j])) {
        refuse("two pieces of the cache overlap. Layers that share memory must be the same view (they are then moved "
               "once); swap cache groups that overlay each other with one kernel each.");
      }
    }
  }
}

}  // namespace

SwapLayout make_layout(const int64_t *pieces, int64_t count, int64_t num_blocks, uint64_t pool, int64_t slot_stride,
                       int64_t num_slots) {
  SwapLayout layout{{}, num_blocks, 0, pool, slot_stride, num_slots};
  for (int64_t i = 0; i < count; ++i, pieces += 3) {
    layout.pieces.push_back({static_cast<uint64_t>(pieces[0]), pieces[1], pieces[2], layout.slot_bytes});
    if (__builtin_add_overflow(layout.slot_bytes, pieces[2], &layout.slot_bytes)) {
      refuse("the pieces of a block do not lie in memory together. Describe the tensors as they were registered.");
    }
  }
  check_layout(layout);
  return layout;
}

void check_batch(const SwapLayout &layout, const SwapBatch &batch) {
  check_ids("block", batch.blocks, batch.count, layout.num_blocks);
  check_ids("slot", batch.slots, batch.count, layout.num_slots);
}

}  // namespace weft
