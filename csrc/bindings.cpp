// Python bindings of Weft's compiled part. src/weft/_csrc.pyi describes what they offer. Users call weft.engine.swap
// instead, which takes tensors, raises Weft's errors and knows the pool. Every batch is validated here before a kernel
// gets it, and the interpreter lock is released while blocks are copied.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "swap_cuda.h"
#include "swap_host.h"
#include "swap_validate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

#if defined(__clang__)
constexpr const char *kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char *kCompiler = "gcc " __VERSION__;
#else
constexpr const char *kCompiler = "unknown";
#endif

#if defined(WEFT_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // of blocks or of slots
using Pieces = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

weft::SwapBatch make_batch(const weft::SwapLayout &layout, bool out, const Ids &blocks, const Ids &slots) {
  if (blocks.shape(0) != slots.shape(0)) {
    throw std::invalid_argument(std::to_string(blocks.shape(0)) + " blocks and " + std::to_string(slots.shape(0)) +
                                " slots. Pass one slot for each block.");
  }
  const weft::SwapBatch batch{out ? weft::Direction::kOut : weft::Direction::kIn, blocks.data(), slots.data(),
                              static_cast<int64_t>(blocks.shape(0))};
  weft::check_batch(layout, batch);
  return batch;
}

class HostSwap {
 public:
  HostSwap(weft::SwapLayout layout, int threads, std::vector<int> cpus)
      : layout_(std::move(layout)), workers_(threads, std::move(cpus)) {}

  void swap(bool out, const Ids &blocks, const Ids &slots) {
    const weft::SwapBatch batch = make_batch(layout_, out, blocks, slots);
    const nb::gil_scoped_release release;
    weft::swap_host(layout_, batch, workers_);
  }

 private:
  const weft::SwapLayout layout_;
  weft::Workers workers_;
};

}  // namespace

NB_MODULE(_csrc, m) {
  m.doc() = "Weft's compiled extension.";
  nb::set_leak_warnings(false);      // vLLM keeps its connector, which has a kernel, until the process ends
  m.attr("version") = WEFT_VERSION;  // must equal weft.__version__; `weft doctor` compares them
  m.attr("compiler") = kCompiler;
  m.attr("has_cuda") = kHasCuda;

  nb::class_<weft::SwapLayout>(m, "SwapLayout")
      .def(
          "__init__",
          [](weft::SwapLayout *self, const Pieces &pieces, int64_t num_blocks, uint64_t pool, int64_t slot_stride,
             int64_t num_slots) {
            new (self) weft::SwapLayout(weft::make_layout(pieces.data(), static_cast<int64_t>(pieces.shape(0)),
                                                          num_blocks, pool, slot_stride, num_slots));
          },
          "pieces"_a, "num_blocks"_a, "pool"_a, "slot_stride"_a, "num_slots"_a)
      .def(
          "check",
          [](const weft::SwapLayout &self, const Ids &blocks, const Ids &slots) {
            make_batch(self, true, blocks, slots);
          },
          "blocks"_a, "slots"_a);

  nb::class_<HostSwap>(m, "HostSwap")
      .def(nb::init<weft::SwapLayout, int, std::vector<int>>(), "layout"_a, "threads"_a, "cpus"_a)
      .def("swap", &HostSwap::swap, "out"_a, "blocks"_a, "slots"_a);

#if defined(WEFT_CUDA)
  m.def("cuda_available", &weft::cuda_available);
  nb::class_<weft::CudaTransfer>(m, "CudaTransfer")
      .def("done", &weft::CudaTransfer::done)
      .def("wait", &weft::CudaTransfer::wait, nb::call_guard<nb::gil_scoped_release>());
  nb::enum_<weft::GpuWay>(m, "GpuWay")
      .value("auto", weft::GpuWay::kAuto)
      .value("kernels", weft::GpuWay::kKernels)
      .value("copy_engines", weft::GpuWay::kCopyEngines);
  nb::class_<weft::CudaSwap>(m, "CudaSwap")
      .def(nb::init<weft::SwapLayout, int, int64_t, weft::GpuWay>(), "layout"_a, "device"_a, "staging_bytes"_a, "way"_a)
      .def(
          "swap",
          [](weft::CudaSwap &self, bool out, const Ids &blocks, const Ids &slots, uintptr_t stream,
             bool beside_compute) {
            const weft::SwapBatch batch = make_batch(self.layout(), out, blocks, slots);
            const nb::gil_scoped_release release;
            return self.swap(batch, stream, beside_compute);
          },
          "out"_a, "blocks"_a, "slots"_a, "stream"_a, "beside_compute"_a)
      .def("synchronize", &weft::CudaSwap::synchronize, nb::call_guard<nb::gil_scoped_release>());
#else
  m.def("cuda_available", [] { return false; });
#endif
}
