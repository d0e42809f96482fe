// The CUDA kernel, see swap_cuda.h. By copy engines, the copy stream moves each piece over the bus. By kernels, a batch
// is cut into chunks that fit a staging buffer: the pack stream gathers a chunk from the engine's cache (or scatters it
// there), and the copy stream moves it over the bus. Events keep both streams in order with each other and with the
// engine's stream (docs/explanation/swap-kernel.md has a drawing).
#include "swap_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>

#include "swap_way.h"

namespace weft {
namespace {

constexpr int kTileBytes = 4096;      // one warp copies one tile at a time
constexpr int kIdsPerLaunch = 896;    // block ids travel as kernel arguments, which may have 4 KiB
constexpr int kThreads = 256;         // in a thread block
constexpr int kMaxThreadBlocks = 64;  // enough for any bus, and most of the GPU is left to the engine
constexpr int kUnroll = 4;            // words that a thread has under way

void check(cudaError_t status, const char *what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next call would report otherwise
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

int driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return version;
}

// Whether memory of the host is page-locked.
bool is_pinned(uint64_t address) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, reinterpret_cast<void *>(address)), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeHost;
}

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() {
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  }
  ~Stream() { cudaStreamDestroy(stream); }
};

struct Event {
  cudaEvent_t event = nullptr;
  Event() { check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() { cudaEventDestroy(event); }
  void record(cudaStream_t stream) const { check(cudaEventRecord(event, stream), "cudaEventRecord"); }
  void hold(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent"); }
};

struct Memory {
  std::byte *bytes = nullptr;
  explicit Memory(size_t size) { check(cudaMalloc(reinterpret_cast<void **>(&bytes), size), "cudaMalloc"); }
  ~Memory() { cudaFree(bytes); }
};

struct Transfer final : CudaTransfer {
  Event event;
  bool done() override {
    const cudaError_t status = cudaEventQuery(event.event);
    if (status == cudaErrorNotReady) return false;
    check(status, "a swap failed");
    return true;
  }
  void wait() override { check(cudaEventSynchronize(event.event), "a swap failed"); }
};

// A part of a piece, at most kTileBytes long. The fields are those of SwapPiece. Every thread block reads the tiles, so
// their table lies in GPU memory.
struct Tile {
  uint64_t address;
  int64_t block_stride;
  int64_t slot_offset;
  int64_t bytes;
};

// The blocks of one launch.
struct Ids {
  int32_t block[kIdsPerLaunch];
};

// Copies tiles [0, tiles) of `count` blocks from the cache to `staging` (`out`), or back. In `staging` the blocks lie
// `stride` bytes apart, and each begins with its byte `first`. The size of Word divides every address, stride and
// length.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    move_tiles(const Tile *table, int tiles, int count, std::byte *staging, int64_t stride, int64_t first, bool out,
               const Ids ids) {
  const int warps = kThreads / 32 * gridDim.x;
  const int lane = threadIdx.x % 32;
  const int64_t rows = static_cast<int64_t>(tiles) * count;
  for (int64_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const int index = static_cast<int>(row / tiles);
    const Tile tile = table[row % tiles];
    Word *page = reinterpret_cast<Word *>(tile.address + ids.block[index] * tile.block_stride);
    Word *staged = reinterpret_cast<Word *>(staging + index * stride + tile.slot_offset - first);
    const Word *from = out ? page : staged;
    Word *to = out ? staged : page;
    const int words = static_cast<int>(tile.bytes / sizeof(Word));
    for (int at = lane; at < words; at += 32 * kUnroll) {
      Word held[kUnroll];  // so that all loads are under way before the first store
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at + 32 * i < words) held[i] = from[at + 32 * i];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at + 32 * i < words) to[at + 32 * i] = held[i];
      }
    }
  }
}

// A part of a batch that fits a staging buffer: several blocks, or some tiles of one block.
struct Chunk {
  int64_t begin, end;  // blocks, as indices in the batch sorted by slot
  int first, last;     // tiles [first, last) of each block
};

// A staging buffer on the GPU.
struct Buffer {
  Memory memory;
  Event free;  // recorded after the last operation that uses the buffer
  explicit Buffer(size_t bytes) : memory(bytes) {}
};

// Copies over the bus, which one call enqueues.
class Copies {
 public:
  Copies(bool out, bool batched) : out_(out), batched_(batched) {}

  // Adds a copy between the GPU's memory and the host's.
  void add(std::byte *gpu, std::byte *host, size_t bytes) {
    to_.push_back(out_ ? host : gpu);
    from_.push_back(out_ ? gpu : host);
    bytes_.push_back(bytes);
  }

  void enqueue(cudaStream_t stream) {
#if CUDART_VERSION >= 12080
    if (batched_ && to_.size() > 1) {
      cudaMemcpyAttributes how{};
      how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;  // a swap before this one may still write to the source
      size_t first = 0;
#if CUDART_VERSION >= 13000
      check(cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &how, &first, 1, stream),
            "cudaMemcpyBatchAsync");
#else  // CUDA 12.8 and 12.9 also give the index of a copy that failed
      size_t failed = 0;
      check(cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &how, &first, 1, &failed, stream),
            "cudaMemcpyBatchAsync");
#endif
      return;
    }
#endif
    const cudaMemcpyKind kind = out_ ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    for (size_t i = 0; i < to_.size(); ++i) {
      check(cudaMemcpyAsync(to_[i], from_[i], bytes_[i], kind, stream), "cudaMemcpyAsync");
    }
  }

 private:
  const bool out_, batched_;
  std::vector<void *> to_, from_;
  std::vector<size_t> bytes_;
};

// The tiles of a block, in the order in which they lie in a slot.
std::vector<Tile> make_tiles(const SwapLayout &layout) {
  std::vector<Tile> tiles;
  for (const SwapPiece &piece : layout.pieces) {
    for (int64_t at = 0; at < piece.bytes; at += kTileBytes) {
      tiles.push_back({piece.address + at, piece.block_stride, piece.slot_offset + at,
                       std::min<int64_t>(kTileBytes, piece.bytes - at)});
    }
  }
  return tiles;
}

// Bytes of the widest word that divides every address, stride and length: a power of two, at most 16.
int common_word(const SwapLayout &layout) {
  int64_t all = 16 | layout.slot_stride;
  for (const SwapPiece &piece : layout.pieces) {
    all |= static_cast<int64_t>(piece.address) | piece.block_stride | piece.slot_offset | piece.bytes;
  }
  return static_cast<int>(all & -all);
}

}  // namespace

struct CudaSwap::Device {
  const SwapLayout layout;
  const int device;
  const std::vector<Tile> tiles;
  const int word;
  const int64_t staging_bytes;
  const GpuWay way;
  const bool batched;  // the driver has cudaMemcpyBatchAsync
  const bool pinned;   // the pool
  Memory table;  // `tiles` in GPU memory
  Buffer buffers[2];
  int next_buffer = 0;
  Stream pack;   // gathers and scatters
  Stream copy;   // copies over the bus, and alone touches the pool
  Event start;   // the engine's stream has reached the swap
  Event staged;  // the first of the two operations on a chunk is done
  Event passed;  // the swap has read or written the engine's cache
  std::mutex mutex;

  Device(SwapLayout where, int which, int64_t staging, GpuWay by)
      : layout(std::move(where)),
        device(which),
        tiles(make_tiles(layout)),
        word(common_word(layout)),
        staging_bytes(std::max<int64_t>(staging, kTileBytes)),
        way(by),
        batched(driver_version() >= 12080),
        pinned(is_pinned(layout.pool)),
        table(tiles.size() * sizeof(Tile)),
        buffers{Buffer(staging_bytes), Buffer(staging_bytes)} {
    // The copy is on the stream that reads the table. cudaMemcpy may return before the bytes are there, and this stream
    // would not wait for them.
    check(cudaMemcpyAsync(table.bytes, tiles.data(), tiles.size() * sizeof(Tile), cudaMemcpyHostToDevice, pack.stream),
          "copying the table of tiles");
    check(cudaStreamSynchronize(pack.stream), "cudaStreamSynchronize");
  }

  // The chunks of a batch of `count` blocks.
  std::vector<Chunk> chunks(int64_t count) const {
    std::vector<Chunk> result;
    const int all = static_cast<int>(tiles.size());
    const int64_t whole_blocks = staging_bytes / layout.slot_stride;
    if (whole_blocks > 0) {
      for (int64_t i = 0; i < count; i += whole_blocks) {
        result.push_back({i, std::min(count, i + whole_blocks), 0, all});
      }
      return result;
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int first = 0, last = 0; first < all; first = last) {
        while (last < all && end_of(last) - tiles[first].slot_offset <= staging_bytes) ++last;
        result.push_back({i, i + 1, first, last});
      }
    }
    return result;
  }

  // Where a tile ends in a slot, in bytes.
  int64_t end_of(int tile) const { return tiles[tile].slot_offset + tiles[tile].bytes; }

  // Whether block i + 1 of the sorted batch continues block i on both sides, so that one copy moves both.
  bool continues(const SwapBatch &batch, const std::vector<int64_t> &order, int64_t i) const {
    const SwapPiece &piece = layout.pieces.front();
    return layout.pieces.size() == 1 && piece.block_stride == piece.bytes && layout.slot_stride == piece.bytes &&
           batch.blocks[order[i + 1]] == batch.blocks[order[i]] + 1 && adjacent(batch, order, i);
  }

  // Whether block i + 1 of the sorted batch has the slot after that of block i.
  static bool adjacent(const SwapBatch &batch, const std::vector<int64_t> &order, int64_t i) {
    return batch.slots[order[i + 1]] == batch.slots[order[i]] + 1;
  }

  bool by_copy_engines(const SwapBatch &batch, const std::vector<int64_t> &order, bool beside_compute) const {
    if (way != GpuWay::kAuto) return way == GpuWay::kCopyEngines;
    if (!pinned || !batch.count) return false;
    int64_t joined = 1, extents = 1;
    for (int64_t i = 0; i + 1 < batch.count; ++i) {
      joined += !continues(batch, order, i);
      extents += !adjacent(batch, order, i);
    }
    const int64_t per_block = static_cast<int64_t>(layout.pieces.size());
    return copy_engines_win({per_block > 1 ? batch.count * per_block : joined, extents, batch.count * layout.slot_bytes,
                             2 * staging_bytes, batch.direction, beside_compute});
  }

  // Copies every piece between the cache and the pool, without kernels.
  void move_directly(const SwapBatch &batch, const std::vector<int64_t> &order) {
    Copies copies(batch.direction == Direction::kOut, batched);
    for (int64_t i = 0, j; i < batch.count; i = j) {
      for (j = i + 1; j < batch.count && continues(batch, order, j - 1);) ++j;
      const int64_t block = batch.blocks[order[i]], slot = batch.slots[order[i]];
      for (const SwapPiece &piece : layout.pieces) {
        copies.add(reinterpret_cast<std::byte *>(piece.address + block * piece.block_stride),
                   reinterpret_cast<std::byte *>(layout.pool + slot * layout.slot_stride + piece.slot_offset),
                   (j - i) * piece.bytes);
      }
    }
    copies.enqueue(copy.stream);
  }

  template <typename Word>
  void launch(const Chunk &chunk, std::byte *staging, bool out, const Ids &ids) {
    const int count = static_cast<int>(chunk.end - chunk.begin), some = chunk.last - chunk.first;
    const int64_t warps = static_cast<int64_t>(count) * some, warps_per_block = kThreads / 32;
    const int64_t thread_blocks = (warps + warps_per_block - 1) / warps_per_block;
    const int grid = static_cast<int>(std::min<int64_t>(thread_blocks, kMaxThreadBlocks));
    const Tile *from = reinterpret_cast<const Tile *>(table.bytes) + chunk.first;
    move_tiles<Word><<<grid, kThreads, 0, pack.stream>>>(from, some, count, staging, layout.slot_stride,
                                                         tiles[chunk.first].slot_offset, out, ids);
    check(cudaGetLastError(), "launching the gather kernel");
  }

  // Gathers a chunk from the cache to a staging buffer, or scatters it from there.
  void move(const Chunk &chunk, const SwapBatch &batch, const std::vector<int64_t> &order, std::byte *staging) {
    const bool out = batch.direction == Direction::kOut;
    for (Chunk part = chunk; part.begin < chunk.end; part.begin = part.end) {
      part.end = std::min<int64_t>(chunk.end, part.begin + kIdsPerLaunch);
      Ids ids;
      for (int64_t i = part.begin; i < part.end; ++i) {
        ids.block[i - part.begin] = static_cast<int32_t>(batch.blocks[order[i]]);
      }
      std::byte *at = staging + (part.begin - chunk.begin) * layout.slot_stride;
      switch (word) {
        case 16: launch<uint4>(part, at, out, ids); break;
        case 8: launch<uint2>(part, at, out, ids); break;
        case 4: launch<uint32_t>(part, at, out, ids); break;
        case 2: launch<uint16_t>(part, at, out, ids); break;
        default: launch<uint8_t>(part, at, out, ids);
      }
    }
  }

  // Copies a chunk from a staging buffer to the pool, or back: one copy for each extent of consecutive slots.
  void cross(const Chunk &chunk, const SwapBatch &batch, const std::vector<int64_t> &order, std::byte *staging) {
    Copies copies(batch.direction == Direction::kOut, batched);
    const int64_t first = tiles[chunk.first].slot_offset;
    for (int64_t i = chunk.begin, j; i < chunk.end; i = j) {
      for (j = i + 1; j < chunk.end && adjacent(batch, order, j - 1);) ++j;  // the extent is [i, j)
      auto *host = reinterpret_cast<std::byte *>(layout.pool + batch.slots[order[i]] * layout.slot_stride) + first;
      copies.add(staging + (i - chunk.begin) * layout.slot_stride, host,
                 (j - i - 1) * layout.slot_stride + end_of(chunk.last - 1) - first);
    }
    copies.enqueue(copy.stream);
  }

  // Gathers or scatters the chunks of a batch, and copies them over the bus.
  void move_by_kernels(const SwapBatch &batch, const std::vector<int64_t> &order) {
    const bool out = batch.direction == Direction::kOut;
    for (const Chunk &chunk : chunks(batch.count)) {
      Buffer &buffer = buffers[next_buffer];
      next_buffer = 1 - next_buffer;
      const cudaStream_t before = out ? pack.stream : copy.stream;
      const cudaStream_t after = out ? copy.stream : pack.stream;
      buffer.free.hold(before);
      out ? move(chunk, batch, order, buffer.memory.bytes) : cross(chunk, batch, order, buffer.memory.bytes);
      staged.record(before);
      staged.hold(after);
      out ? cross(chunk, batch, order, buffer.memory.bytes) : move(chunk, batch, order, buffer.memory.bytes);
      buffer.free.record(after);
    }
  }
};

CudaSwap::CudaSwap(SwapLayout layout, int device, int64_t staging_bytes, GpuWay way) {
  if (layout.num_blocks > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("the cache has " + std::to_string(layout.num_blocks) +
                                " blocks, and a GPU swaps at most 2^31 - 1. Use larger blocks.");
  }
  OnDevice here(device);
  device_ = std::make_unique<Device>(std::move(layout), device, staging_bytes, way);
}

CudaSwap::~CudaSwap() {
  try {
    OnDevice here(device_->device);
    synchronize();
    device_.reset();
  } catch (const std::runtime_error &) {
    device_.release();  // CUDA has shut down already and freed this memory
  }
}

const SwapLayout &CudaSwap::layout() const { return device_->layout; }

void CudaSwap::synchronize() {
  check(cudaStreamSynchronize(device_->pack.stream), "cudaStreamSynchronize");
  check(cudaStreamSynchronize(device_->copy.stream), "cudaStreamSynchronize");
}

std::shared_ptr<CudaTransfer> CudaSwap::swap(const SwapBatch &batch, uintptr_t stream, bool beside_compute) {
  Device &d = *device_;
  const std::lock_guard lock(d.mutex);
  const OnDevice here(d.device);
  const auto engine = reinterpret_cast<cudaStream_t>(stream);
  auto transfer = std::make_shared<Transfer>();
  std::vector<int64_t> order(batch.count);
  std::iota(order.begin(), order.end(), 0);
  const auto by_slot = [&](int64_t a, int64_t b) { return batch.slots[a] < batch.slots[b]; };
  if (!std::is_sorted(order.begin(), order.end(), by_slot)) std::sort(order.begin(), order.end(), by_slot);

  const bool directly = d.by_copy_engines(batch, order, beside_compute);
  const cudaStream_t touching = directly ? d.copy.stream : d.pack.stream;  // reads or writes the engine's cache
  d.start.record(engine);
  d.start.hold(touching);
  d.passed.hold(touching);  // the swap before this one may have been on the other stream
  directly ? d.move_directly(batch, order) : d.move_by_kernels(batch, order);
  d.passed.record(touching);
  if (!beside_compute) d.passed.hold(engine);
  transfer->event.record(batch.direction == Direction::kOut ? d.copy.stream : touching);
  return transfer;
}

bool cuda_available() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && count > 0;
}

}  // namespace weft
