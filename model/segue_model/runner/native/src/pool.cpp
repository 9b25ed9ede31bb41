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
  task_ = nullptr;
  tasks_.add(1);
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

void Pool::run(Task& task) {
  task_ = &task;
  next_item_.store(0, std::memory_order_relaxed);
  running_.reset(static_cast<uint32_t>(threads_ - 1));
  tasks_.add(1);
  task.work(0);
  running_.wait([](uint32_t running) { return running == 0; });
}

void Pool::barrier() {
  const uint32_t round = rounds_.load();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_item_.store(0, std::memory_order_relaxed);
    rounds_.add(1);
    return;
  }
  rounds_.wait([round](uint32_t now) { return now != round; });
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
  for (uint32_t seen = 0;;) {
    tasks_.wait([seen](uint32_t tasks) { return tasks != seen; });
    seen = tasks_.load();
    if (task_ == nullptr) return;
    task_->work(thread);
    running_.add(-1);
  }
}

}  // namespace segue
