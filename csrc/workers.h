// A few threads that share the work of one call. Not OpenMP: torch brings its own copy of that runtime, a second one in
// the process would spin beside it, and vLLM pins its threads one to a core.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace weft {

class Workers {
 public:
  // `threads` counts the caller. The others start at the first call that can use them and run on `cpus` if that is not
  // empty (a new thread inherits the caller's affinity, which in vLLM's CPU worker is a single core).
  Workers(int threads, std::vector<int> cpus);
  ~Workers();

  // Calls task(0) ... task(n - 1), each once, in no order, and returns when all have returned. Tasks must not throw.
  // A second caller waits for the first.
  void run(int64_t n, const std::function<void(int64_t)> &task);

 private:
  struct Team;
  Team &team();

  const int threads_;
  const std::vector<int> cpus_;
  std::unique_ptr<Team> team_;
};

}  // namespace weft
