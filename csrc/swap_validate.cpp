// Validation, see swap_validate.h. Overlap is found exactly, not by bounds. The search goes through the blocks only
// where two pieces have different strides, so it is quick for a cache with many blocks.
#include "swap_validate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

using Wide = __int128;  // wide enough for products of addresses

[[noreturn]] void refuse(const std::string &what) { throw std::invalid_argument(what); }

// `count` spans of `bytes` bytes each. The first starts at `first`, the others every `stride` bytes.
struct Spans {
  Wide first, stride, bytes, count;
  Wide end() const { return first + (count - 1) * stride + bytes; }
};

Wide floor_div(Wide a, Wide b) { return a / b - (a % b < 0); }

// Whether any span of `a` shares a byte with [begin, end).
bool touches(const Spans &a, Wide begin, Wide end) {
  // Span k is the first that ends after `begin`, and so the lowest one that may share a byte.
  const Wide k = std::max<Wide>(0, floor_div(begin - a.first - a.bytes, a.stride) + 1);
  return k < a.count && a.first + k * a.stride < end;
}

// Whether any span of `a` shares a byte with any span of `b`.
bool overlap(const Spans &a, const Spans &b) {
  if (a.end() <= b.first || b.end() <= a.first) return false;
  if (a.stride == b.stride) {
    // Span j of b meets span k of a if d = j - k gives a.first - b.bytes < b.first + d * stride < a.first + a.bytes.
    const Wide d = floor_div(a.first - b.bytes - b.first, a.stride) + 1;  // the least d that satisfies the left side
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
             ". Pass numbers from 0 to " + number(limit - 1) + ".");
    }
    uint64_t &word = seen[static_cast<size_t>(id) / 64];
    const uint64_t bit = uint64_t{1} << (id % 64);
    if (word & bit) {
      refuse(std::string(what) + " " + number(id) + " appears twice in one call. Pass each number at most once: the "
             "copies run in no particular order.");
    }
    word |= bit;
  }
}

void check_layout(const SwapLayout &layout) {
  if (layout.pieces.empty() || layout.num_blocks < 1 || layout.num_slots < 1) {
    refuse("the layout holds nothing to swap: " + number(static_cast<int64_t>(layout.pieces.size())) + " pieces, " +
           number(layout.num_blocks) + " blocks, " + number(layout.num_slots) + " slots. Each must be at least 1.");
  }
  if (layout.slot_stride < layout.slot_bytes) {
    refuse("a slot of the pool has " + number(layout.slot_stride) + " bytes and a block needs " +
           number(layout.slot_bytes) + ". Make the pool with slot_bytes=" + number(layout.slot_bytes) + ".");
  }
  const Wide space = Wide{1} << 63;
  const Spans pool{layout.pool, layout.slot_stride, layout.slot_stride, layout.num_slots};
  if (layout.pool == 0 || pool.end() > space) refuse("the pool does not lie in the address space. Pass an open pool.");

  std::vector<Spans> spans;
  for (const SwapPiece &piece : layout.pieces) {
    const Spans span{piece.address, std::max<Wide>(piece.block_stride, 1), piece.bytes, layout.num_blocks};
    if (piece.address == 0 || piece.bytes < 1 || piece.block_stride < 0 || span.end() > space) {
      refuse("a piece of " + number(piece.bytes) + " bytes every " + number(piece.block_stride) +
             " bytes does not lie in the address space. Describe the tensors as they were registered.");
    }
    if (layout.num_blocks > 1 && piece.block_stride < piece.bytes) {
      refuse("the blocks overlap: a piece of " + number(piece.bytes) + " bytes every " + number(piece.block_stride) +
             " bytes. Pass a cache whose blocks share no memory.");
    }
    if (touches(span, pool.first, pool.end())) {
      refuse("the pool overlaps the cache. Give the pool memory of its own.");
    }
    spans.push_back(span);
  }
  std::sort(spans.begin(), spans.end(), [](const Spans &a, const Spans &b) { return a.first < b.first; });
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t j = i + 1; j < spans.size() && spans[j].first < spans[i].end(); ++j) {
      if (overlap(spans[i], spans[j])) {
        refuse("two pieces of the cache overlap. Layers that share memory must be the same view, which is moved once. "
               "Cache groups that share memory need a kernel each.");
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
      refuse("the pieces of a block exceed the address space. Describe the tensors as they were registered.");
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
