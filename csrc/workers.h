// A few threads that share the work of one call. OpenMP is not used for three reasons: torch brings a copy of its
// runtime, the threads of a second copy in the process would spin at the same time, and vLLM pins OpenMP's threads to
// one core each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace weft {

class Workers {
 public:
  // `threads` includes the caller. The other threads start with the first call that can use them. They run on `cpus`
  // unless it is empty, because a new thread inherits the caller's affinity, which in vLLM's CPU worker is a single
  // core. Throws std::invalid_argument unless `threads` is 1 to 1024.
  Workers(int threads, std::vector<int> cpus);
  ~Workers();

  // Calls task(0) ... task(n - 1), each once and in any order, and returns when all have returned. Tasks must not
  // throw. A second caller waits until the first call has returned.
  void run(int64_t n, const std::function<void(int64_t)> &task);

 private:
  struct Team;
  Team &team();

  const int threads_;
  const std::vector<int> cpus_;
  std::unique_ptr<Team> team_;
};

}  // namespace weft
