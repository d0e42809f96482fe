// Threads that share the work of one call, see workers.h. A call publishes its task under a mutex, all threads take the
// next number from an atomic counter, and the caller waits until no thread is active. After a fork, the child process
// starts threads of its own.
#include "workers.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace weft {

struct Workers::Team {
  const pid_t pid = getpid();
  std::mutex busy;  // held during a call, by its caller

  std::mutex mutex;  // guards the fields from here to `threads`
  std::condition_variable wake, idle;
  const std::function<void(int64_t)> *task = nullptr;  // null between calls
  uint64_t call = 0;
  int active = 0;  // threads that work on the present call
  bool stop = false;
  std::vector<std::thread> threads;

  std::atomic<int64_t> next{0};  // number of the next task
  int64_t n = 0;                 // tasks of the present call

  void work(const std::function<void(int64_t)> &each) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) each(i);
  }

  void loop() {
    std::unique_lock lock(mutex);
    for (uint64_t last = 0;;) {
      wake.wait(lock, [&] { return stop || (task != nullptr && call != last); });
      if (stop) return;
      last = call;
      ++active;
      const auto *each = task;
      lock.unlock();
      work(*each);
      lock.lock();
      if (--active == 0) idle.notify_one();
    }
  }

  ~Team() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread &thread : threads) thread.join();
  }
};

Workers::Workers(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)) {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument(std::to_string(threads) + " threads. Give 1 to 1024.");
  }
  team_ = std::make_unique<Team>();
}

Workers::~Workers() {
  if (team_->pid != getpid()) team_.release();  // this is a forked process, which does not have these threads
}

Workers::Team &Workers::team() {
  if (team_->pid != getpid()) {
    team_.release();
    team_ = std::make_unique<Team>();
  }
  return *team_;
}

void Workers::run(int64_t n, const std::function<void(int64_t)> &task) {
  if (n < 2 || threads_ < 2) {
    for (int64_t i = 0; i < n; ++i) task(i);
    return;
  }
  Team &team = this->team();
  const std::lock_guard busy(team.busy);
  {
    std::lock_guard lock(team.mutex);
    while (static_cast<int>(team.threads.size()) < threads_ - 1) {
      try {
        team.threads.emplace_back([&team] { team.loop(); });
      } catch (const std::system_error &) {
        break;  // the system gives no more threads, so fewer threads do the work
      }
      if (cpus_.empty()) continue;
      cpu_set_t set;
      CPU_ZERO(&set);
      for (int cpu : cpus_) CPU_SET(cpu, &set);
      // A failure is ignored, because the affinity is only a hint.
      pthread_setaffinity_np(team.threads.back().native_handle(), sizeof set, &set);
    }
    team.n = n;
    team.next.store(0, std::memory_order_relaxed);
    team.task = &task;
    ++team.call;
  }
  team.wake.notify_all();
  team.work(task);
  std::unique_lock lock(team.mutex);
  team.task = nullptr;  // a thread that wakes from now on finds no task
  team.idle.wait(lock, [&] { return team.active == 0; });
}

}  // namespace weft
