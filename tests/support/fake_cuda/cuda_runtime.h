// A fake of the CUDA runtime on the CPU, with the part of it that csrc/swap_cuda.cu uses. Streams are queues. When the
// program waits, the fake runs a random one of the operations that may run. So an order that no event enforces is soon
// violated.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#define __global__ static
#define __launch_bounds__(n)

enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorInvalidDevice = 101 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost };
struct cudaPointerAttributes { cudaMemoryType type; };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;

#define CUDART_VERSION 13000
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1, cudaMemcpySrcAccessOrderAny = 3 };
struct cudaMemcpyAttributes { cudaMemcpySrcAccessOrder srcAccessOrder; };

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct Index { unsigned x; };
inline Index blockIdx, threadIdx, gridDim;

namespace fake {

struct Event {
  int recorded = 0, reached = 0;  // counts of records
};

struct Operation {
  std::function<bool()> ready;
  std::function<void()> act;
};

struct Stream {
  std::deque<Operation> queue;
};

inline Stream engine;  // stream 0
inline std::vector<Stream *> streams{&engine};
inline std::mt19937 random;
inline int launches = 0, copies = 0;  // since the test has set them to 0
inline int driver_version = 13000;
inline bool pinned = true;

inline Stream *at(Stream *stream) { return stream ? stream : &engine; }

inline void push(Stream *stream, std::function<void()> act, std::function<bool()> ready = [] { return true; }) {
  at(stream)->queue.push_back({std::move(ready), std::move(act)});
}

inline void step() {
  std::vector<Stream *> able;
  for (Stream *stream : streams) {
    if (!stream->queue.empty() && stream->queue.front().ready()) able.push_back(stream);
  }
  if (able.empty()) {
    std::fputs("fake CUDA: deadlock, every stream waits\n", stderr);
    std::abort();
  }
  Stream *stream = able[random() % able.size()];
  const Operation operation = std::move(stream->queue.front());
  stream->queue.pop_front();
  operation.act();
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, int grid, int threads, size_t, Stream *stream, Arguments... arguments) {
  ++launches;
  push(stream, [=] {
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < static_cast<unsigned>(threads); ++threadIdx.x) kernel(arguments...);
    }
  });
}

}  // namespace fake

using cudaStream_t = fake::Stream *;
using cudaEvent_t = fake::Event *;

inline const char *cudaGetErrorString(cudaError_t) { return "a fake error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int *version) { return *version = fake::driver_version, cudaSuccess; }
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *) {
  attributes->type = fake::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { return *low = *high = 0, cudaSuccess; }

inline cudaError_t cudaMalloc(void **memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0xEE, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void *memory) { return std::free(memory), cudaSuccess; }

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  fake::streams.push_back(*stream = new fake::Stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  while (!fake::at(stream)->queue.empty()) fake::step();
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  for (size_t i = 0; i < fake::streams.size(); ++i) {
    if (fake::streams[i] == stream) fake::streams.erase(fake::streams.begin() + i);
  }
  delete stream;
  return cudaSuccess;
}

// An event is never freed, because work that waits for it may still be queued. A GPU keeps it until then, too.
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = new fake::Event;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int count = ++event->recorded;
  fake::push(stream, [=] { event->reached = std::max(event->reached, count); });
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const int count = event->recorded;
  fake::push(stream, [] {}, [=] { return event->reached >= count; });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (cudaEventQuery(event) != cudaSuccess) fake::step();
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ++fake::copies;
  fake::push(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes, size_t count,
                                        cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t stream) {
  for (size_t i = 0; i < count; ++i) cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDeviceToHost, stream);
  return cudaSuccess;
}
