// The CUDA kernel: the swap of an engine whose KV cache is in GPU memory (Autellix §4.2.2). Many small pieces are
// gathered into a contiguous buffer on the GPU, which then crosses the bus in one copy; swap-in does the reverse. Few or
// large pieces cross the bus one by one. This header includes no CUDA header, so the bindings compile without nvcc.
#pragma once

#include <cstdint>
#include <memory>

#include "swap_params.h"
#include "swap_way.h"

namespace weft {

// Whether this machine has a CUDA driver and a GPU. Never throws.
bool cuda_available();

// A swap that has been handed to the GPU.
class CudaTransfer {
 public:
  virtual ~CudaTransfer() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
};

// Swaps the blocks of one layout on one GPU. It has two buffers of `staging_bytes` there (at least one tile), so one
// buffer is gathered while the other crosses the bus. The two overlap only if the pool is page-locked. Every method
// throws std::runtime_error if CUDA reports an error.
class CudaSwap {
 public:
  CudaSwap(SwapLayout layout, int device, int64_t staging_bytes, GpuWay way);
  ~CudaSwap();

  // Enqueues a batch that `check_batch` has accepted, and returns at once. `batch` is not needed afterwards. The swap
  // runs after the work that is on `stream` already. Work that `stream` is given later runs after the swap has read or
  // written the engine's cache, unless `beside_compute`: then it runs meanwhile, and must leave the blocks alone. Swaps
  // run one after the other, so slots may be given to other blocks at once.
  std::shared_ptr<CudaTransfer> swap(const SwapBatch &batch, uintptr_t stream, bool beside_compute);

  // Returns when all swaps so far are done.
  void synchronize();

  const SwapLayout &layout() const;

 private:
  struct Device;
  std::unique_ptr<Device> device_;
};

}  // namespace weft
