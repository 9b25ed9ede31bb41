// A few threads that share out the items of one round after another; see waiting.h for how they wait. A stream of decode
// steps hardly ever waits for the kernel, and an idle server uses no CPU.
//
// A round is over when its items are done, not when every thread has been there: a thread that has lost its core to a
// neighbour, and holds no item, is not waited for.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "waiting.h"

namespace segue {

class Pool {
 public:
  explicit Pool(int threads);  // the caller of share() is one of them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  void keep_workers_on(const int32_t* cores);  // thread i on cores[i]; the caller of share() is thread 0

  // Calls each(thread, begin, end) with ranges of 0 .. total - 1 until all are done. Ranges shrink towards the end, so
  // that a thread which lost its core to a neighbour does not keep the others waiting. Not to be called inside `each`.
  template <class Each>
  void share(int total, const Each& each) {
    run({&call<Each>, &each, total}, 0);
  }
  // The same with each(thread, item), item by item.
  template <class Each>
  void share_singly(int total, const Each& each) {
    const auto items = [&](int thread, int begin, int end) {
      for (int item = begin; item < end; item++) each(thread, item);
    };
    run({&call<decltype(items)>, &items, total}, kSingly);
  }

 private:
  struct Round {
    void (*call)(const void* each, int thread, int begin, int end);
    const void* each;
    int total;
  };
  static constexpr uint32_t kSingly = uint32_t{1} << 31;

  template <class Each>
  static void call(const void* each, int thread, int begin, int end) {
    (*static_cast<const Each*>(each))(thread, begin, end);
  }

  void run(const Round& round, uint32_t how);
  void take_part(int thread);
  void worker(int thread);

  const int threads_;
  std::atomic<bool> ending_{false};
  Signal rounds_;  // counts up with every round
  Signal undone_;  // items of the round that are not done
  // How many items of the round nobody has claimed, | kSingly. Who takes some away has a claim, and with it a round that
  // lasts until he is done: only then he looks at round_.
  alignas(64) std::atomic<uint32_t> unclaimed_{0};
  std::atomic<const Round*> round_{nullptr};
  std::vector<std::thread> workers_;
};

}  // namespace segue
