// A few threads that share out the items of one round after another; see waiting.h for how they wait. A stream of decode
// steps hardly ever waits for the kernel, and an idle server uses no CPU.
//
// Each thread has a region of the items and goes through it in order, so that what it asks memory for in advance is what
// it will use. Who is done takes from the end of another's. A round is over when its items are done, not when every
// thread has been there: a thread that has lost its core to a neighbour, and holds no item, is not waited for.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
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

  // Calls each(thread, begin, end) with ranges of 0 .. total - 1 until all are done. Not to be called inside `each`.
  template <class Each>
  void share(int total, const Each& each) {
    run({&call<Each>, &each}, total, total, false);
  }

  // The same with each(thread, item), item by item, dealt out: after `item` a thread takes item + threads(), if nobody
  // else has.
  template <class Each>
  void deal(int total, const Each& each) {
    const int most = (total + threads_ - 1) / threads_;  // of a thread
    const auto items = [&](int thread, int begin, int end) {
      for (int i = begin; i < end; i++) {
        const int item = i / most + i % most * threads_;
        if (item < total) each(thread, item);
      }
    };
    run({&call<decltype(items)>, &items}, total, most * threads_, true);
  }

 private:
  struct Round {
    void (*call)(const void* each, int thread, int begin, int end);
    const void* each;
  };
  // Items that nobody has claimed.
  struct Range {
    uint32_t begin, end : 31, singly : 1;  // singly: to be claimed one by one, otherwise half of them at a time
  };
  struct alignas(64) Region {
    std::atomic<Range> left{Range{0, 0, 0}};
  };

  template <class Each>
  static void call(const void* each, int thread, int begin, int end) {
    (*static_cast<const Each*>(each))(thread, begin, end);
  }

  void run(const Round& round, int items, int places, bool singly);
  void take_part(int thread);
  bool claim(int thread, Range& claimed);
  static bool take(Region& region, bool own, Range& claimed);
  void worker(int thread);

  const int threads_;
  std::atomic<bool> ending_{false};
  Signal rounds_;  // counts up with every round
  Signal undone_;  // items of the round that are not done
  // Who takes items out of a region has a claim, and with it a round that lasts until he is done: only then he looks at
  // round_.
  std::unique_ptr<Region[]> regions_;
  std::atomic<const Round*> round_{nullptr};
  std::vector<std::thread> workers_;
};

}  // namespace segue
