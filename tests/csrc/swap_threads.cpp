// The host kernel and its threads under ThreadSanitizer (make test-tsan), without Python, whose interpreter is not
// instrumented.
//
//   swap_threads          several callers share a kernel and others have their own; exit code 0 if every byte arrived
//   swap_threads race     two kernels write to the same slots at once, which ThreadSanitizer must report
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "swap_host.h"
#include "swap_validate.h"

namespace {

constexpr int64_t kBlocks = 96, kPieces = 4, kPieceBytes = 24 << 10;
constexpr int64_t kBlockBytes = kPieces * kPieceBytes;
constexpr int64_t kBatch = 64;  // 6 MiB: other threads are woken for it
constexpr int kThreads = 4, kCallers = 3, kRounds = 6;

// A cache, a pool, and the kernel's view of them. A block's layers lie apart, as in vLLM's cache.
struct Memory {
  std::vector<std::byte> cache = std::vector<std::byte>(kBlocks * kBlockBytes);
  std::byte *pool = static_cast<std::byte *>(std::aligned_alloc(64, kBlocks * kBlockBytes));

  Memory() { std::memset(pool, 0, kBlocks * kBlockBytes); }
  ~Memory() { std::free(pool); }

  weft::SwapLayout layout() {
    std::vector<int64_t> pieces;
    for (int64_t piece = 0; piece < kPieces; ++piece) {
      const auto first = reinterpret_cast<int64_t>(cache.data() + piece * kBlocks * kPieceBytes);
      pieces.insert(pieces.end(), {first, kPieceBytes, kPieceBytes});
    }
    return weft::make_layout(pieces.data(), kPieces, kBlocks, reinterpret_cast<uint64_t>(pool), kBlockBytes, kBlocks);
  }
};

std::vector<int64_t> some_ids(std::mt19937 &random) {
  std::vector<int64_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(kBatch);
  return ids;
}

void swap(const weft::SwapLayout &layout, weft::Workers &workers, weft::Direction direction,
          const std::vector<int64_t> &blocks, const std::vector<int64_t> &slots) {
  const weft::SwapBatch batch{direction, blocks.data(), slots.data(), static_cast<int64_t>(blocks.size())};
  weft::check_batch(layout, batch);
  weft::swap_host(layout, batch, workers);
}

// One caller: it swaps blocks of its own memory out and in again, and looks at every byte. It shares `workers` with the
// other callers.
void call(weft::Workers &workers, unsigned seed) {
  std::mt19937 random(seed);
  Memory memory;
  for (size_t i = 0; i < memory.cache.size(); ++i) memory.cache[i] = static_cast<std::byte>(i * 7 + seed);
  const std::vector<std::byte> before = memory.cache;
  const weft::SwapLayout layout = memory.layout();
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<int64_t> blocks = some_ids(random), slots = some_ids(random);
    swap(layout, workers, weft::Direction::kOut, blocks, slots);
    for (int64_t block : blocks) {
      for (int64_t piece = 0; piece < kPieces; ++piece) {
        std::memset(memory.cache.data() + (piece * kBlocks + block) * kPieceBytes, 0, kPieceBytes);
      }
    }
    swap(layout, workers, weft::Direction::kIn, blocks, slots);
    if (memory.cache != before) {
      std::fprintf(stderr, "caller %u, round %d: bytes are lost\n", seed, round);
      std::_Exit(1);
    }
  }
}

void callers() {
  weft::Workers shared(kThreads, {0});
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kCallers; ++seed) threads.emplace_back([&, seed] { call(shared, seed); });
  for (std::thread &thread : threads) thread.join();
  for (unsigned seed = 0; seed < 20; ++seed) {  // kernels that end at once, with and without work
    weft::Workers own(kThreads, {});
    if (seed % 4 == 0) continue;
    own.run(3, [](int64_t) {});
  }
}

// A forked process, which does not have the parent's threads, makes threads of its own.
void forked() {
  weft::Workers workers(kThreads, {});
  call(workers, 100);
  const pid_t child = fork();
  if (child == 0) {
    call(workers, 101);
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  call(workers, 102);
  if (status != 0) {
    std::fprintf(stderr, "the forked process ended with status %d\n", status);
    std::_Exit(1);
  }
}

void race() {
  Memory memory;
  const weft::SwapLayout layout = memory.layout();
  const auto write = [&](unsigned seed) {
    std::mt19937 random(seed);
    weft::Workers workers(2, {});
    const std::vector<int64_t> blocks = some_ids(random), slots = some_ids(random);
    swap(layout, workers, weft::Direction::kOut, blocks, slots);
  };
  std::thread other(write, 1);
  write(2);
  other.join();
}

}  // namespace

// ThreadSanitizer gives up by default when a forked process starts threads.
extern "C" const char *__tsan_default_options() { return "die_after_fork=0"; }

int main(int count, char **arguments) {
  if (count > 1 && std::strcmp(arguments[1], "race") == 0) {
    race();
  } else {
    callers();
    forked();
  }
  return 0;
}
