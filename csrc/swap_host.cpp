#include "swap_host.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// The numbers below were measured on cold memory, which a swap's slots are (docs/swap.md has the figures).

namespace weft {
namespace {

constexpr int64_t kTask = 256 << 10;   // bytes that one thread takes at a time
constexpr int64_t kShare = 4 << 20;    // bytes from which waking other threads pays
constexpr int64_t kRun = 64 << 10;     // a contiguous copy is cut to this, so that the next one can be prefetched
constexpr int64_t kAlone = 32 << 10;   // a run as long as this fills the memory system by itself
constexpr int kLanes = 4;              // shorter ones are copied four at a time, in step
constexpr int kPrefetchLines = 16;     // of 64 bytes, of what is copied next

struct Run {
  std::byte *to;
  const std::byte *from;
  int64_t bytes;
};

// A batch is one string of bytes, slot after slot. This walks [begin, end) of it in contiguous runs.
class Runs {
 public:
  Runs(const SwapLayout &layout, const SwapBatch &batch, int64_t begin, int64_t end)
      : layout_(layout), batch_(batch), left_(end - begin), index_(begin / layout.slot_bytes) {
    const int64_t at = begin % layout.slot_bytes;
    piece_ = std::upper_bound(layout.pieces.begin(), layout.pieces.end(), at,
                              [](int64_t offset, const SwapPiece &each) { return offset < each.slot_offset; }) - 1;
    offset_ = at - piece_->slot_offset;
    locate();
  }

  bool next(Run &run) {
    if (left_ == 0) return false;
    if (offset_ == piece_->bytes) {
      offset_ = 0;
      if (++piece_ == layout_.pieces.end()) {
        piece_ = layout_.pieces.begin();
        ++index_;
      }
      locate();
    }
    const int64_t bytes = std::min({kRun, piece_->bytes - offset_, left_});
    std::byte *page = page_ + offset_, *slot = slot_ + offset_;
    run = batch_.direction == Direction::kOut ? Run{slot, page, bytes} : Run{page, slot, bytes};
    offset_ += bytes;
    left_ -= bytes;
    return true;
  }

 private:
  void locate() {
    page_ = reinterpret_cast<std::byte *>(piece_->address + batch_.blocks[index_] * piece_->block_stride);
    slot_ = reinterpret_cast<std::byte *>(layout_.pool + batch_.slots[index_] * layout_.slot_stride) +
            piece_->slot_offset;
  }

  const SwapLayout &layout_;
  const SwapBatch &batch_;
  int64_t left_, index_, offset_;  // bytes to go, place in the batch, bytes into the piece
  std::vector<SwapPiece>::const_iterator piece_;
  std::byte *page_, *slot_;
};

// Runs that are copied together.
struct Group {
  Run runs[kLanes];
  int size = 0;

  explicit Group(Runs &source) {
    while (size < kLanes && source.next(runs[size])) {
      if (runs[size++].bytes >= kAlone) break;
    }
  }
};

void check_poison([[maybe_unused]] const Run &run) {
#if defined(__SANITIZE_ADDRESS__)  // which does not see streaming stores
  if (__asan_region_is_poisoned(run.to, run.bytes)) std::memset(run.to, 0, run.bytes);  // reports
#endif
}

void copy_plain(const Group &group) {
  for (int i = 0; i < group.size; ++i) std::memcpy(group.runs[i].to, group.runs[i].from, group.runs[i].bytes);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void stream_128(const Run &run, int64_t at) {
  const auto *from = reinterpret_cast<const __m256i *>(run.from + at);
  auto *to = reinterpret_cast<__m256i *>(run.to + at);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1), c = _mm256_loadu_si256(from + 2),
                d = _mm256_loadu_si256(from + 3);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
  _mm256_stream_si256(to + 2, c);
  _mm256_stream_si256(to + 3, d);
}

// Stores past the cache: neither side of a swap is read again soon enough to pay for reading the old lines first.
__attribute__((target("avx2"))) void copy_streaming(const Group &group) {
  int64_t common = group.size == kLanes ? kRun : 0;
  for (int i = 0; i < group.size; ++i) {
    if (reinterpret_cast<uintptr_t>(group.runs[i].to) % 32 != 0) return copy_plain(group);
    common = std::min(common, group.runs[i].bytes / 128 * 128);
    check_poison(group.runs[i]);
  }
  // In step, because the hardware prefetcher starts anew on every page: four pages keep four of its streams busy.
  for (int64_t at = 0; at < common; at += 128) {
    for (int i = 0; i < kLanes; ++i) stream_128(group.runs[i], at);
  }
  for (int i = 0; i < group.size; ++i) {
    const Run &run = group.runs[i];
    int64_t at = common;
    for (; at + 128 <= run.bytes; at += 128) stream_128(run, at);
    if (at < run.bytes) std::memcpy(run.to + at, run.from + at, run.bytes - at);
  }
}
#endif

void move_range(const SwapLayout &layout, const SwapBatch &batch, int64_t begin, int64_t end) {
  auto copy = copy_plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) copy = copy_streaming;
#endif
  Runs runs(layout, batch, begin, end);
  for (Group group(runs); group.size > 0;) {
    const Group after(runs);
    for (int i = 0; i < after.size; ++i) {
      for (int line = 0; line < kPrefetchLines / after.size; ++line) {
        __builtin_prefetch(after.runs[i].from + 64 * line);
      }
    }
    copy(group);
    group = after;
  }
#if defined(__x86_64__)
  _mm_sfence();  // streaming stores become visible before the task counts as done
#endif
}

}  // namespace

void swap_host(const SwapLayout &layout, const SwapBatch &batch, Workers &workers) {
  const int64_t total = layout.slot_bytes * batch.count;
  const int64_t task = total < kShare ? kShare : kTask;
  workers.run((total + task - 1) / task, [&](int64_t i) {
    move_range(layout, batch, i * task, std::min(total, (i + 1) * task));
  });
}

}  // namespace weft
