// Anonymous memory in huge pages where the system has them: a step reads every weight once, and with 4 KiB pages it
// would miss the TLB for each of them. Untouched memory takes no room.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace segue {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// A zeroed mapping, aligned to a huge page. Throws std::bad_alloc.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : mapped_bytes_(round_up(bytes, kHugePage) + kHugePage) {
    void* at = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    mapped_ = at;
    data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(at), kHugePage));
#if defined(MADV_HUGEPAGE)
    madvise(data_, mapped_bytes_ - kHugePage, MADV_HUGEPAGE);
#endif
  }
  ~Mapping() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }
  Mapping(Mapping&& other) noexcept
      : mapped_bytes_(other.mapped_bytes_), mapped_(std::exchange(other.mapped_, nullptr)), data_(other.data_) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  uint8_t* data() const { return data_; }

 private:
  size_t mapped_bytes_;
  void* mapped_ = nullptr;
  uint8_t* data_ = nullptr;
};

// Hands out zeroed memory, aligned to cache lines, that lives as long as the arena.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = round_up(count * sizeof(T), 64);
    if (bytes > free_) {
      chunks_.emplace_back(bytes > kChunk ? bytes : kChunk);
      next_ = chunks_.back().data();
      free_ = bytes > kChunk ? bytes : kChunk;
    }
    used_ += bytes;
    free_ -= bytes;
    return reinterpret_cast<T*>(std::exchange(next_, next_ + bytes));
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kChunk = size_t{64} << 20;
  std::vector<Mapping> chunks_;
  uint8_t* next_ = nullptr;
  size_t free_ = 0, used_ = 0;
};

}  // namespace segue
