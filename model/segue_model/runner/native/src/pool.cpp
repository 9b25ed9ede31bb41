#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace segue {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;                              // some tens of microseconds
constexpr auto kAwake = std::chrono::microseconds{1000};  // yielding, before a thread goes to sleep

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spin, then give the core away at every look; for waits that other running threads will end.
template <class Done>
void wait_awake(Done done) {
  for (int spin = 0; !done(); spin++) {
    if (spin < kSpins)
      pause();
    else
      std::this_thread::yield();
  }
}

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::worker, this, i);
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    tasks_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Task& task) {
  task_ = &task;
  next_item_.store(0, std::memory_order_relaxed);
  running_.store(threads_ - 1, std::memory_order_relaxed);
  if (threads_ > 1) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);  // a worker looks at tasks_ under it before it sleeps
      tasks_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  task.work(0);
  wait_awake([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void Pool::barrier() {
  if (threads_ == 1) {
    next_item_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t round = rounds_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_item_.store(0, std::memory_order_relaxed);
    rounds_.store(round + 1, std::memory_order_release);
    return;
  }
  wait_awake([&] { return rounds_.load(std::memory_order_acquire) != round; });
}

bool Pool::claim(int total, int& begin, int& end) {
  begin = next_item_.load(std::memory_order_relaxed);
  do {
    if (begin >= total) return false;
    end = begin + std::max(1, (total - begin) * 3 / (4 * threads_));
  } while (!next_item_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
  return true;
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (next_task(seen)) {
    task_->work(thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

bool Pool::next_task(uint32_t& seen) {
  const auto ready = [&] { return tasks_.load(std::memory_order_acquire) != seen; };
  for (int spin = 0; spin < kSpins && !ready(); spin++) pause();
  for (const auto sleep_at = Clock::now() + kAwake; !ready() && Clock::now() < sleep_at;) std::this_thread::yield();
  if (!ready()) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, ready);
  }
  seen = tasks_.load(std::memory_order_acquire);
  return !stop_;
}

}  // namespace segue
