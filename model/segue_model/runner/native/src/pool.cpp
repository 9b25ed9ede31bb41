#include "pool.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace segue {

Pool::Pool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::worker, this, i);
}

Pool::~Pool() {
  ending_ = true;
  rounds_.add(1);
  for (std::thread& worker : workers_) worker.join();
}

// Where the system refuses, the thread stays free.
void Pool::keep_workers_on([[maybe_unused]] const int32_t* cores) {
#if defined(__linux__)
  for (int thread = 1; thread < threads_; thread++) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[thread], &set);
    pthread_setaffinity_np(workers_[thread - 1].native_handle(), sizeof(set), &set);
  }
#endif
}

void Pool::run(const Round& round, uint32_t how) {
  if (round.total <= 0) return;
  if (threads_ == 1 || round.total == 1) return round.call(round.each, 0, 0, round.total);
  const auto items = static_cast<uint32_t>(round.total);
  undone_.reset(items);
  round_.store(&round, std::memory_order_relaxed);
  unclaimed_.store(items | how, std::memory_order_release);
  rounds_.add(1);
  take_part(0);
  undone_.wait([](uint32_t undone) { return undone == 0; });
}

void Pool::take_part(int thread) {
  uint32_t seen = unclaimed_.load(std::memory_order_acquire);
  while (const int left = static_cast<int>(seen & ~kSingly)) {
    const int count = seen & kSingly ? 1 : std::max(1, left * 3 / (4 * threads_));
    if (!unclaimed_.compare_exchange_weak(seen, seen - static_cast<uint32_t>(count), std::memory_order_acquire)) continue;
    const Round& round = *round_.load(std::memory_order_relaxed);
    const int begin = round.total - left;
    round.call(round.each, thread, begin, begin + count);
    undone_.add(-count);
    seen = unclaimed_.load(std::memory_order_acquire);
  }
}

void Pool::worker(int thread) {
  for (uint32_t seen = 0;;) {
    rounds_.wait([seen](uint32_t rounds) { return rounds != seen; });
    seen = rounds_.load();
    if (ending_) return;
    take_part(thread);
  }
}

}  // namespace segue
