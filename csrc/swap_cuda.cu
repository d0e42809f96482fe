// The CUDA kernel, see swap_cuda.h. A batch is cut into chunks that fit a staging buffer. The pack stream gathers a
// chunk from the engine's cache (or scatters it there), the copy stream moves it over the bus, and events keep both in
// order with each other and with the engine's stream (docs/explanation/swap-kernel.md has a drawing).
#include "swap_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>

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
  Memory table;  // `tiles` in GPU memory
  Buffer buffers[2];
  int next_buffer = 0;
  Stream pack;   // gathers and scatters
  Stream copy;   // copies over the bus
  Event start;   // the engine's stream has reached the swap
  Event staged;  // the first of the two operations on a chunk is done
  Event packed;  // all gathers or scatters of the swap are done
  std::mutex mutex;

  Device(SwapLayout where, int which, int64_t staging)
      : layout(std::move(where)),
        device(which),
        tiles(make_tiles(layout)),
        word(common_word(layout)),
        staging_bytes(std::max<int64_t>(staging, kTileBytes)),
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
    const int64_t whole_blocks = std::min<int64_t>(staging_bytes / layout.slot_stride, kIdsPerLaunch);
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
    Ids ids;
    for (int64_t i = chunk.begin; i < chunk.end; ++i) {
      ids.block[i - chunk.begin] = static_cast<int32_t>(batch.blocks[order[i]]);
    }
    const bool out = batch.direction == Direction::kOut;
    switch (word) {
      case 16: return launch<uint4>(chunk, staging, out, ids);
      case 8: return launch<uint2>(chunk, staging, out, ids);
      case 4: return launch<uint32_t>(chunk, staging, out, ids);
      case 2: return launch<uint16_t>(chunk, staging, out, ids);
      default: return launch<uint8_t>(chunk, staging, out, ids);
    }
  }

  // Copies a chunk from a staging buffer to the pool, or back: one copy for each extent of consecutive slots.
  void cross(const Chunk &chunk, const SwapBatch &batch, const std::vector<int64_t> &order, std::byte *staging) {
    const int64_t first = tiles[chunk.first].slot_offset;
    for (int64_t i = chunk.begin, j; i < chunk.end; i = j) {
      const int64_t slot = batch.slots[order[i]];
      for (j = i + 1; j < chunk.end && batch.slots[order[j]] == slot + (j - i);) ++j;  // the extent is [i, j)
      const size_t bytes = (j - i - 1) * layout.slot_stride + end_of(chunk.last - 1) - first;
      auto *host = reinterpret_cast<std::byte *>(layout.pool + slot * layout.slot_stride) + first;
      std::byte *staged_bytes = staging + (i - chunk.begin) * layout.slot_stride;
      if (batch.direction == Direction::kOut) {
        check(cudaMemcpyAsync(host, staged_bytes, bytes, cudaMemcpyDeviceToHost, copy.stream), "copying to the host");
      } else {
        check(cudaMemcpyAsync(staged_bytes, host, bytes, cudaMemcpyHostToDevice, copy.stream), "copying to the GPU");
      }
    }
  }
};

CudaSwap::CudaSwap(SwapLayout layout, int device, int64_t staging_bytes) {
  if (layout.num_blocks > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("the cache has " + std::to_string(layout.num_blocks) +
                                " blocks, and a GPU swaps at most 2^31 - 1. Use larger blocks.");
  }
  OnDevice here(device);
  device_ = std::make_unique<Device>(std::move(layout), device, staging_bytes);
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

std::shared_ptr<CudaTransfer> CudaSwap::swap(const SwapBatch &batch, uintptr_t stream) {
  Device &d = *device_;
  const std::lock_guard lock(d.mutex);
  const OnDevice here(d.device);
  const auto engine = reinterpret_cast<cudaStream_t>(stream);
  const bool out = batch.direction == Direction::kOut;
  auto transfer = std::make_shared<Transfer>();
  std::vector<int64_t> order(batch.count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return batch.slots[a] < batch.slots[b]; });

  d.start.record(engine);
  d.start.hold(d.pack.stream);
  for (const Chunk &chunk : d.chunks(batch.count)) {
    Buffer &buffer = d.buffers[d.next_buffer];
    d.next_buffer = 1 - d.next_buffer;
    const cudaStream_t before = out ? d.pack.stream : d.copy.stream;
    const cudaStream_t after = out ? d.copy.stream : d.pack.stream;
    buffer.free.hold(before);
    out ? d.move(chunk, batch, order, buffer.memory.bytes) : d.cross(chunk, batch, order, buffer.memory.bytes);
    d.staged.record(before);
    d.staged.hold(after);
    out ? d.cross(chunk, batch, order, buffer.memory.bytes) : d.move(chunk, batch, order, buffer.memory.bytes);
    buffer.free.record(after);
  }
  d.packed.record(d.pack.stream);
  d.packed.hold(engine);
  transfer->event.record(out ? d.copy.stream : d.pack.stream);
  return transfer;
}

bool cuda_available() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && count > 0;
}

}  // namespace weft
