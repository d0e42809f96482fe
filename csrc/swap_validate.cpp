// Validation, see swap_validate.h. Overlap is found exactly, not by bounds, and in a time that does not grow with the
// number of blocks.
#include "swap_validate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

using Wide = __int128;  // wide enough for products of addresses
using UWide = unsigned __int128;

constexpr int64_t kMostMarks = int64_t{1} << 24;  // 2 MiB of bits

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

// The sum of floor((a * i + b) / m) for i = 0 ... n - 1, modulo 2^128. Requires m > 0. Each round takes the remainder of
// a Euclidean division, so there are few.
UWide floor_sum(UWide n, UWide m, UWide a, UWide b) {
  UWide sum = 0;
  for (;;) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const UWide top = a * n + b;
    if (top < m) return sum;
    n = top / m;
    b = top % m;
    std::swap(m, a);
  }
}

// Whether any span of `a` shares a byte with any span of `b`.
bool overlap(const Spans &a, const Spans &b) {
  if (a.end() <= b.first || b.end() <= a.first) return false;
  // Spans of b that do not lie between the ends of a as a whole meet a's first or last span, or no span.
  if (touches(b, a.first, a.first + a.bytes) || touches(b, a.end() - a.bytes, a.end())) return true;
  const Wide low = std::max<Wide>(0, floor_div(a.first - b.first - 1, b.stride) + 1);
  const Wide count = std::min(b.count, floor_div(a.end() - b.first - 1, b.stride) + 1) - low;
  if (count <= 0) return false;
  // Of the others, one that starts r bytes after a's latest start meets that span if r < a.bytes, and the next one if
  // r > a.stride - b.bytes. Both are one condition: (r + b.bytes - 1) mod a.stride < width.
  const Wide width = a.bytes + b.bytes - 1;
  if (width >= a.stride) return true;
  // The number of starts that satisfy it is a difference of two sums, for floor(x / m) - floor((x - width) / m) is 1 if
  // x mod m < width, and 0 otherwise. One more stride keeps x - width above 0.
  const UWide x = static_cast<UWide>(b.first + low * b.stride - a.first + b.bytes - 1 + a.stride);
  const auto n = static_cast<UWide>(count), m = static_cast<UWide>(a.stride), step = static_cast<UWide>(b.stride);
  return floor_sum(n, m, step, x) != floor_sum(n, m, step, x - static_cast<UWide>(width));
}

std::string number(int64_t value) { return std::to_string(value); }

// An id that appears twice; -1 if none does. Marking ids is ten times as fast as sorting them, and takes a bit for each
// number between the lowest and the highest.
int64_t first_twice(const int64_t *ids, int64_t count, int64_t lowest, int64_t highest) {
  if (highest - lowest < kMostMarks) {
    std::vector<bool> seen(count ? highest - lowest + 1 : 0);
    for (int64_t i = 0; i < count; ++i) {
      if (seen[ids[i] - lowest]) return ids[i];
      seen[ids[i] - lowest] = true;
    }
    return -1;
  }
  std::vector<int64_t> sorted(ids, ids + count);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  return twice != sorted.end() ? *twice : -1;
}

void check_ids(const char *what, const int64_t *ids, int64_t count, int64_t limit) {
  int64_t lowest = limit, highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= limit) {
      refuse(std::string(what) + " " + number(ids[i]) + " is out of range: there are " + number(limit) +
             ". Pass numbers from 0 to " + number(limit - 1) + ".");
    }
    lowest = std::min(lowest, ids[i]);
    highest = std::max(highest, ids[i]);
  }
  const int64_t twice = first_twice(ids, count, lowest, highest);
  if (twice >= 0) {
    refuse(std::string(what) + " " + number(twice) + " appears twice in one call. Pass each number at most once: the "
           "copies run in no particular order.");
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
