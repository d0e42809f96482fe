// The swap where the engine's KV cache is in GPU memory (Autellix §4.2.2): blocks are gathered into a contiguous buffer on
// the GPU, which then crosses the bus in one copy; and the reverse. Free of CUDA headers, for the bindings.
#pragma once

#include <cstdint>
#include <memory>

#include "swap_params.h"

namespace weft {

// Whether a driver and a GPU are there. Never throws.
bool cuda_available();

// A swap that has been handed to the GPU.
class CudaTransfer {
 public:
  virtual ~CudaTransfer() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
};

// Two buffers of at most `staging_bytes` on the GPU, so that one is gathered while the other crosses the bus. The pool
// must be page-locked for that overlap. Every method throws std::runtime_error if CUDA reports an error.
class CudaSwap {
 public:
  CudaSwap(SwapLayout layout, int device, int64_t staging_bytes);
  ~CudaSwap();

  // Enqueues a batch that `check_batch` has passed and returns at once; `batch` is not needed afterwards.
  // The swap comes after what `stream` has been given so far, and what it is given later comes after the swap as far as
  // the engine's cache is concerned. Swaps follow one another, so slots may be given to other blocks at once.
  std::shared_ptr<CudaTransfer> swap(const SwapBatch &batch, uintptr_t stream);

  // Returns when every swap so far is done.
  void synchronize();

  const SwapLayout &layout() const;

 private:
  struct Device;
  std::unique_ptr<Device> device_;
};

}  // namespace weft
