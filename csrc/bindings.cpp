// Python bindings of Weft's compiled part. The KV swap kernel will be bound here.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace {

#if defined(__clang__)
constexpr const char *kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char *kCompiler = "gcc " __VERSION__;
#else
constexpr const char *kCompiler = "unknown";
#endif

}  // namespace

NB_MODULE(_csrc, m) {
  m.doc() = "Weft's compiled extension.";
  m.attr("version") = WEFT_VERSION;    // must equal weft.__version__; `weft doctor` compares them
  m.attr("compiler") = kCompiler;
}
