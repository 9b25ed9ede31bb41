// A few threads that work on one task together; see waiting.h for how they wait. A stream of decode steps hardly ever
// waits for the kernel, and an idle server uses no CPU.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "waiting.h"

namespace segue {

class Task {
 public:
  virtual void work(int thread) = 0;  // called once on every thread of the pool

 protected:
  ~Task() = default;
};

class Pool {
 public:
  explicit Pool(int threads);  // the caller of run() is one of them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  void keep_workers_on(const int32_t* cores);  // thread i on cores[i]; the caller of run() is thread 0
  void run(Task& task);  // returns when every thread has

  // Inside a task: wait until all threads are here. Also begins a new round of shares.
  void barrier();

  // Inside a task: calls each(begin, end) until the `total` items of this round are spent. Ranges shrink towards the
  // end, so that a thread which lost its core to a neighbour does not keep the others waiting.
  template <class Each>
  void share(int total, Each each) {
    int begin, end;
    while (claim(total, begin, end)) each(begin, end);
  }
  // The same, item by item.
  template <class Each>
  void share_singly(int total, Each each) {
    for (int item; (item = next_item_.fetch_add(1, std::memory_order_relaxed)) < total;) each(item);
  }

 private:
  bool claim(int total, int& begin, int& end);
  void worker(int thread);

  const int threads_;
  Task* task_ = nullptr;  // null: the pool ends
  Signal tasks_;          // counts up with every task
  Signal running_;        // workers still inside it
  Signal rounds_;         // counts up with every barrier passed
  alignas(64) std::atomic<int> arrived_{0};  // threads at the barrier
  alignas(64) std::atomic<int> next_item_{0};
  std::vector<std::thread> workers_;
};

}  // namespace segue
