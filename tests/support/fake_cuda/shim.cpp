// A C interface to CudaSwap and to the fake GPU's engine stream, for ctypes.
#include <cuda_runtime.h>

#include <utility>

#include "swap_cuda.h"
#include "swap_validate.h"

using weft::CudaSwap;
using weft::CudaTransfer;

extern "C" {

CudaSwap *swap_create(const int64_t *pieces, int64_t count, int64_t blocks, uint64_t pool, int64_t stride,
                      int64_t slots, int64_t staging, int way) {
  return new CudaSwap(weft::make_layout(pieces, count, blocks, pool, stride, slots), 0, staging,
                      static_cast<weft::GpuWay>(way));
}

void swap_destroy(CudaSwap *swap) { delete swap; }

std::shared_ptr<CudaTransfer> *swap_start(CudaSwap *swap, int out, const int64_t *blocks, const int64_t *slots,
                                          int64_t count, int beside_compute) {
  const weft::SwapBatch batch{out ? weft::Direction::kOut : weft::Direction::kIn, blocks, slots, count};
  weft::check_batch(swap->layout(), batch);
  return new auto(swap->swap(batch, 0, beside_compute));
}

void swap_synchronize(CudaSwap *swap) { swap->synchronize(); }

int transfer_done(std::shared_ptr<CudaTransfer> *transfer) { return (*transfer)->done(); }
void transfer_wait(std::shared_ptr<CudaTransfer> *transfer) { (*transfer)->wait(); }
void transfer_destroy(std::shared_ptr<CudaTransfer> *transfer) { delete transfer; }

int copy_engines_win(int64_t pieces, int64_t extents, int64_t bytes, int out, int beside_compute) {
  return weft::copy_engines_win(
      {pieces, extents, bytes, 64 << 20, out ? weft::Direction::kOut : weft::Direction::kIn, beside_compute != 0});
}

void fake_seed(uint32_t seed) { fake::random.seed(seed); }
void fake_driver(int version) { fake::driver_version = version; }
void fake_pinned(int pinned) { fake::pinned = pinned; }

// Gives how many kernels were launched and copies were enqueued since the last call.
void fake_counts(int counts[2]) {
  counts[0] = std::exchange(fake::launches, 0);
  counts[1] = std::exchange(fake::copies, 0);
}

// An operation of the engine between two swaps: a copy on the engine's stream.
void engine_copy(void *to, const void *from, int64_t bytes) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, nullptr);
}

void device_synchronize() {
  for (const auto stream : fake::streams) cudaStreamSynchronize(stream);
}

void engine_synchronize() { cudaStreamSynchronize(nullptr); }

}
