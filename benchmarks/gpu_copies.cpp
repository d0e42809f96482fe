// The copies that benchmarks/gpu_measure.py compares the swap kernel with, as C functions for ctypes, so that no baseline
// pays for Python between two copies. Each function returns a cudaError_t as a number. The caller makes the lists of
// addresses beforehand.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// One cudaMemcpyAsync a block.
int copy_each(int64_t count, void *const *to, const void *const *from, size_t bytes, int to_host, cudaStream_t stream) {
  const cudaMemcpyKind kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t status = cudaMemcpyAsync(to[i], from[i], bytes, kind, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// All blocks in one call. The source may be read in any order if it is host memory, as vLLM 0.32 has it.
int copy_batch(int64_t count, void *const *to, const void *const *from, const size_t *sizes, int to_host,
               cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes how{};
  how.srcAccessOrder = to_host ? cudaMemcpySrcAccessOrderStream : cudaMemcpySrcAccessOrderAny;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(to, from, sizes, static_cast<size_t>(count), &how, &first, 1, stream);
#else  // CUDA 12.8 and 12.9 take no const, and give the index of the copy that failed
  size_t failed = 0;
  return cudaMemcpyBatchAsync(const_cast<void **>(to), const_cast<void **>(from), const_cast<size_t *>(sizes),
                              static_cast<size_t>(count), &how, &first, 1, &failed, stream);
#endif
#else
  return cudaErrorNotSupported;
#endif
}

// Returns when all copies on the stream are done.
int finish(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

// What an error means. It is not reported again by the next call.
const char *error_text(int status) {
  cudaGetLastError();
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}
