#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace segue {

Pool::Pool(int threads) : threads_(threads), regions_(std::make_unique<Region[]>(threads)) {
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

void Pool::run(const Round& round, int items, int places, bool singly) {
  if (items <= 0) return;
  if (threads_ == 1 || items == 1) return round.call(round.each, 0, 0, places);
  undone_.reset(places);
  round_.store(&round, std::memory_order_relaxed);
  for (int thread = 0; thread < threads_; thread++) {
    const auto edge = [=](int of) { return static_cast<uint32_t>(int64_t{places} * of / threads_); };
    regions_[thread].left.store({edge(thread), edge(thread + 1), singly}, std::memory_order_release);
  }
  rounds_.add(1);
  take_part(0);
  undone_.wait([](uint32_t undone) { return undone == 0; });
}

void Pool::take_part(int thread) {
  for (Range claimed; claim(thread, claimed);) {
    const Round& round = *round_.load(std::memory_order_relaxed);
    round.call(round.each, thread, claimed.begin, claimed.end);
    undone_.add(-static_cast<int32_t>(claimed.end - claimed.begin));
  }
}

bool Pool::claim(int thread, Range& claimed) {
  for (int i = 0; i < threads_; i++)
    if (take(regions_[(thread + i) % threads_], i == 0, claimed)) return true;
  return false;
}

// From the front of one's own region, from the end of another's.
bool Pool::take(Region& region, bool own, Range& claimed) {
  Range seen = region.left.load(std::memory_order_acquire);
  while (const uint32_t left = seen.end - seen.begin) {
    const uint32_t count = seen.singly ? 1 : (left + 1) / 2;
    const uint32_t middle = own ? seen.begin + count : seen.end - count;
    const Range front{seen.begin, middle, seen.singly}, back{middle, seen.end, seen.singly};
    claimed = own ? front : back;
    if (region.left.compare_exchange_weak(seen, own ? back : front)) return true;
  }
  return false;
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
