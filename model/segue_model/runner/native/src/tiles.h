// The matrix unit of AMX: eight tiles of up to 16 rows of 64 bytes, and the product of two of them in bf16.
//
// tile_dot adds a [rows][32] b [32][16] to c [rows][16]; b lies in pairs, [16][16][2]. Each element of c gets the sum of
// two chains of fused multiply-adds, over even and over odd columns ascending, and is rounded once more when they are
// added: the same sequence of roundings whatever the other rows hold, and however many there are.
//
// Instructions are written out, because the intrinsics of some compilers do not say that tiles touch memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace segue {

constexpr int kTileBytes = 1024;  // of a full tile

template <int Tile>
SEGUE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
SEGUE_INLINE void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}
// The same for what will not be used again soon: it leaves the first-level cache to others.
template <int Tile>
SEGUE_INLINE void tile_stream(const void* from, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
SEGUE_INLINE void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}
template <int C, int A, int B>
SEGUE_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Shapes of this thread's tiles, from now on; they are zero afterwards.
class TileShapes {
 public:
  SEGUE_INLINE void set(int tile, int rows, int row_bytes) {
    memory_.rows[tile] = static_cast<uint8_t>(rows);
    memory_.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
  SEGUE_INLINE void use() const { asm volatile("ldtilecfg %0" ::"m"(memory_)); }

  static SEGUE_INLINE void release() { asm volatile("tilerelease" ::); }

 private:
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } memory_;
};

}  // namespace segue
