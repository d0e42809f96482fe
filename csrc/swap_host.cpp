// The host kernel, see swap_host.h. A batch is cut into tasks of equal size, one thread works on a task, and a task is
// a sequence of contiguous copies, four of which are made in step. The constants below were measured on cold memory,
// because the slots of a swap are not in the caches (docs/results/swap-kernel.md has the figures).
#include "swap_host.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_write_range(void *address, long bytes);  // as GCC declares it
#endif

namespace weft {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;   // a thread takes so many bytes at a time
constexpr int64_t kSharedBytes = 4 << 20;   // waking other threads pays for batches from this size on
constexpr int64_t kMaxCopyBytes = 64 << 10; // longer copies are divided, so that the next one can be prefetched
constexpr int64_t kAloneBytes = 32 << 10;   // a copy of this size uses all of the memory system by itself
constexpr int kLanes = 4;                   // so many shorter copies are made in step
constexpr int kPrefetchLines = 16;          // lines of 64 bytes that are prefetched of the next group

struct Copy {
  std::byte *to;
  const std::byte *from;
  int64_t bytes;
};

// Iterates over the contiguous copies of a part of a batch. All bytes of the batch are numbered, slot after slot; the
// part is [begin, end).
class Copies {
 public:
  Copies(const SwapLayout &layout, const SwapBatch &batch, int64_t begin, int64_t end)
      : layout_(layout), batch_(batch), left_(end - begin), index_(begin / layout.slot_bytes) {
    const int64_t at = begin % layout.slot_bytes;
    piece_ = std::upper_bound(layout.pieces.begin(), layout.pieces.end(), at,
                              [](int64_t offset, const SwapPiece &each) { return offset < each.slot_offset; }) - 1;
    offset_ = at - piece_->slot_offset;
    locate();
  }

  bool next(Copy &copy) {
    if (left_ == 0) return false;
    if (offset_ == piece_->bytes) {
      offset_ = 0;
      if (++piece_ == layout_.pieces.end()) {
        piece_ = layout_.pieces.begin();
        ++index_;
      }
      locate();
    }
    const int64_t bytes = std::min({kMaxCopyBytes, piece_->bytes - offset_, left_});
    std::byte *page = page_ + offset_, *slot = slot_ + offset_;
    copy = batch_.direction == Direction::kOut ? Copy{slot, page, bytes} : Copy{page, slot, bytes};
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
  int64_t left_, index_, offset_;  // bytes to go, index in the batch, bytes of the piece that are done
  std::vector<SwapPiece>::const_iterator piece_;
  std::byte *page_, *slot_;
};

// Copies that are made in step.
struct Group {
  Copy copies[kLanes];
  int size = 0;

  explicit Group(Copies &source) {
    while (size < kLanes && source.next(copies[size])) {
      if (copies[size++].bytes >= kAloneBytes) break;
    }
  }
};

// Sanitizers do not see streaming stores.
void tell_sanitizer([[maybe_unused]] const Copy &copy) {
#if defined(__SANITIZE_ADDRESS__)
  if (__asan_region_is_poisoned(copy.to, copy.bytes)) std::memset(copy.to, 0, copy.bytes);  // makes it report
#elif defined(__SANITIZE_THREAD__)
  __tsan_write_range(copy.to, copy.bytes);
#endif
}

void copy_plain(const Group &group) {
  for (int i = 0; i < group.size; ++i) std::memcpy(group.copies[i].to, group.copies[i].from, group.copies[i].bytes);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void stream_128(const Copy &copy, int64_t at) {
  const auto *from = reinterpret_cast<const __m256i *>(copy.from + at);
  auto *to = reinterpret_cast<__m256i *>(copy.to + at);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1), c = _mm256_loadu_si256(from + 2),
                d = _mm256_loadu_si256(from + 3);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
  _mm256_stream_si256(to + 2, c);
  _mm256_stream_si256(to + 3, d);
}

// Stores bypass the caches. An ordinary store would first read the old line, and the bytes of a swap are not used again
// soon enough to pay for that.
__attribute__((target("avx2"))) void copy_streaming(const Group &group) {
  int64_t common = group.size == kLanes ? kMaxCopyBytes : 0;
  for (int i = 0; i < group.size; ++i) {
    if (reinterpret_cast<uintptr_t>(group.copies[i].to) % 32 != 0) return copy_plain(group);
    common = std::min(common, group.copies[i].bytes / 128 * 128);
    tell_sanitizer(group.copies[i]);
  }
  // The hardware prefetcher starts again on every page. Copying four pages in step keeps four of its streams busy.
  for (int64_t at = 0; at < common; at += 128) {
    for (int i = 0; i < kLanes; ++i) stream_128(group.copies[i], at);
  }
  for (int i = 0; i < group.size; ++i) {
    const Copy &copy = group.copies[i];
    int64_t at = common;
    for (; at + 128 <= copy.bytes; at += 128) stream_128(copy, at);
    if (at < copy.bytes) std::memcpy(copy.to + at, copy.from + at, copy.bytes - at);
  }
}
#endif

void move_range(const SwapLayout &layout, const SwapBatch &batch, int64_t begin, int64_t end) {
  auto copy_group = copy_plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) copy_group = copy_streaming;
#endif
  Copies copies(layout, batch, begin, end);
  for (Group group(copies); group.size > 0;) {
    const Group next(copies);
    for (int i = 0; i < next.size; ++i) {
      for (int line = 0; line < kPrefetchLines / next.size; ++line) {
        __builtin_prefetch(next.copies[i].from + 64 * line);
      }
    }
    copy_group(group);
    group = next;
  }
#if defined(__x86_64__)
  _mm_sfence();  // makes the streaming stores visible before the task counts as done
#endif
}

}  // namespace

void swap_host(const SwapLayout &layout, const SwapBatch &batch, Workers &workers) {
  const int64_t total = layout.slot_bytes * batch.count;
  const int64_t task = total < kSharedBytes ? kSharedBytes : kTaskBytes;
  workers.run((total + task - 1) / task, [&](int64_t i) {
    move_range(layout, batch, i * task, std::min(total, (i + 1) * task));
  });
}

}  // namespace weft
