// Keys and values of 16 positions of one KV head, K and V side by side; three element types behind one set of names.
//
//   float32  K [width][16]                      V [16][width]
//   bf16     K [width / 2][16][2]               V [8][width][2]        pairs, as dot_bf16 takes them
//   int8     K u8 (+ 128) [width / 4][16][4]    V s8 [4][width][4]     fours, as the byte dot products take them
//            then f32 scales of the 16 keys and of the 16 values
//
// K lies channel-major, so that one vector is 16 keys; V lies position-major, so that one vector is 16 channels. The
// width is head_dim rounded up to 16, zero beyond it.
#pragma once
#include <cstring>

#include "simd.h"

namespace segue {

constexpr int kPage = 16;           // positions
constexpr int kSegment = 256;       // positions of a segment of attention, counted from position 0
constexpr int kMaxWidth = 256;      // largest head
constexpr int kQueries = kMatrixUnit ? 32 : 12;  // queries of one KV head that a kernel takes at once,
constexpr int kBlock = kMatrixUnit ? 192 : 12;    // and that walk its pages together

enum class KvType : int32_t { float32 = 0, bf16 = 1, int8 = 2 };

// Up to kBlock queries, rotated and scaled, in the element type of the pages they meet.
struct Queries {
  alignas(64) float plain[kBlock * kMaxWidth];
  alignas(64) Narrow narrow[kBlock * kMaxWidth];
  alignas(64) int8_t codes[kBlock * kMaxWidth];
  float scale[kBlock];
  int32_t zero[kBlock];  // -128 * sum of the codes: meets the keys' + 128
};

// Scores, then weights, of a segment, which take the place of scores already read.
struct Weights {
  static constexpr int kPitch = kSegment + kPage;  // floats; a power of two would crowd rows into few sets of a cache

  float* plain(int row) { return memory + row * kPitch; }
  const float* plain(int row) const { return memory + row * kPitch; }
  Narrow* narrow(int row) { return reinterpret_cast<Narrow*>(plain(row)); }
  const Narrow* narrow(int row) const { return reinterpret_cast<const Narrow*>(plain(row)); }

  alignas(64) float memory[kQueries * kPitch];
};

struct PageF32 {
  static constexpr size_t bytes(int width) { return size_t(2) * kPage * width * 4; }

  static void write(uint8_t* page, int width, int position, const float* k, const float* v) {
    auto *keys = reinterpret_cast<float*>(page), *values = keys + kPage * width;
    for (int i = 0; i < width; i++) keys[i * kPage + position] = k[i];
    std::memcpy(values + position * width, v, sizeof(float) * width);
  }

  static void read(const uint8_t* page, int width, int position, float* k, float* v) {
    const auto *keys = reinterpret_cast<const float*>(page), *values = keys + kPage * width;
    for (int i = 0; i < width; i++) k[i] = keys[i * kPage + position];
    std::memcpy(v, values + position * width, sizeof(float) * width);
  }

  static void prepare(Queries&, int, int) {}
  static void store_weights(Weights& w, int row, int column, F32 weights) {
    store(w.plain(row) + column, weights);
  }

  // What becomes of a row's weights before `mix` takes them, once a page.
  static void weigh(const uint8_t*, int, Weights&, int, int) {}

  // Scores of N queries, from `query` on, against the 16 keys of a page, to N rows at `column`
  template <int N>
  static void score(const uint8_t* page, int width, const Queries& q, int query, Weights& w, int row, int column) {
    const auto* keys = reinterpret_cast<const float*>(page);
    F32 even[N], odd[N];
    SEGUE_UNROLL for (int i = 0; i < N; i++) even[i] = odd[i] = zero();
    const float* x = q.plain + query * width;
    for (int d = 0; d < width; d += 2) {
      const F32 first = load(keys + d * kPage), second = load(keys + (d + 1) * kPage);
      SEGUE_UNROLL for (int i = 0; i < N; i++) {
        even[i] = fma(first, splat(x[i * width + d]), even[i]);
        odd[i] = fma(second, splat(x[i * width + d + 1]), odd[i]);
      }
    }
    SEGUE_UNROLL for (int i = 0; i < N; i++) store(w.plain(row + i) + column, add(even[i], odd[i]));
  }

  // mixed[row][channel ..] += weights * V for V vectors of channels
  template <int N, int V>
  static void mix(const uint8_t* page, int width, const Weights& w, int row, int column, int channel, float* mixed) {
    const float* values = reinterpret_cast<const float*>(page) + kPage * width + channel;
    F32 acc[N][V];
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++)
      acc[i][j] = load(mixed + (row + i) * width + channel + j * kLanes);
    constexpr int kRow = Weights::kPitch;
    const float* weight = w.plain(row) + column;
    for (int p = 0; p < kPage; p++)
      SEGUE_UNROLL for (int j = 0; j < V; j++) {
        const F32 v = load(values + p * width + j * kLanes);
        SEGUE_UNROLL for (int i = 0; i < N; i++) acc[i][j] = fma(v, splat(weight[i * kRow + p]), acc[i][j]);
      }
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++)
      store(mixed + (row + i) * width + channel + j * kLanes, acc[i][j]);
  }
};

struct PageBf16 {
  static constexpr size_t bytes(int width) { return size_t(2) * kPage * width * 2; }

  static void write(uint8_t* page, int width, int position, const float* k, const float* v) {
    uint16_t key[kMaxWidth], value[kMaxWidth];  // rounded first, in loops that compilers make vectors of
    for (int i = 0; i < width; i++) key[i] = to_bf16(k[i]);
    for (int i = 0; i < width; i++) value[i] = to_bf16(v[i]);
    auto *keys = reinterpret_cast<uint16_t*>(page), *values = keys + kPage * width;
    for (int i = 0; i < width; i += 2) std::memcpy(keys + i * kPage + position * 2, key + i, 2 * sizeof(uint16_t));
    values += position / 2 * width * 2 + position % 2;
    for (int i = 0; i < width; i++) values[i * 2] = value[i];
  }

  static void read(const uint8_t* page, int width, int position, float* k, float* v) {
    const auto *keys = reinterpret_cast<const uint16_t*>(page), *values = keys + kPage * width;
    for (int i = 0; i < width; i++) {
      k[i] = from_bf16(keys[(i / 2) * 32 + position * 2 + i % 2]);
      v[i] = from_bf16(values[(position / 2) * width * 2 + i * 2 + position % 2]);
    }
  }

  static void prepare(Queries& q, int query, int width) {
    for (int i = 0; i < width; i += kLanes) store_narrow(q.narrow + query * width + i, load(q.plain + query * width + i));
  }
  static void store_weights(Weights& w, int row, int column, F32 weights) {
    store_narrow(w.narrow(row) + column, weights);
  }

  static void weigh(const uint8_t*, int, Weights&, int, int) {}

  template <int N>
  static void score(const uint8_t* page, int width, const Queries& q, int query, Weights& w, int row, int column) {
    F32 even[N], odd[N];
    SEGUE_UNROLL for (int i = 0; i < N; i++) even[i] = odd[i] = zero();
    const Narrow* x = q.narrow + query * width;
    for (int d = 0; d < width; d += 4) {
      const Bytes first = load_bytes(page + d * 32), second = load_bytes(page + (d + 2) * 32);
      SEGUE_UNROLL for (int i = 0; i < N; i++) {
        even[i] = dot_bf16(even[i], first, x + i * width + d);
        odd[i] = dot_bf16(odd[i], second, x + i * width + d + 2);
      }
    }
    SEGUE_UNROLL for (int i = 0; i < N; i++) store(w.plain(row + i) + column, add(even[i], odd[i]));
  }

  template <int N, int V>
  static void mix(const uint8_t* page, int width, const Weights& w, int row, int column, int channel, float* mixed) {
    const auto* values = reinterpret_cast<const uint16_t*>(page) + kPage * width + channel * 2;
    F32 acc[N][V];
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++)
      acc[i][j] = load(mixed + (row + i) * width + channel + j * kLanes);
    constexpr int kRow = Weights::kPitch * sizeof(float) / sizeof(Narrow);
    const Narrow* weight = w.narrow(row) + column;
    for (int p = 0; p < kPage; p += 2)
      SEGUE_UNROLL for (int j = 0; j < V; j++) {
        const Bytes v = load_bytes(values + p * width + j * 32);
        SEGUE_UNROLL for (int i = 0; i < N; i++) acc[i][j] = dot_bf16(acc[i][j], v, weight + i * kRow + p);
      }
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++)
      store(mixed + (row + i) * width + channel + j * kLanes, acc[i][j]);
  }
};

struct PageInt8 {
  static constexpr size_t bytes(int width) { return size_t(2) * kPage * width + 2 * kPage * 4; }

  static const float* scales(const uint8_t* page, int width) {
    return reinterpret_cast<const float*>(page + 2 * kPage * width);
  }

  // peak / 127 with the low seven bits cleared: 127 * scale is then exact, so that values read as floats and written
  // again get the same scale and the same codes.
  static float scale_of(const float* x, int width) {
    float peak = 0;
    for (int i = 0; i < width; i++) peak = std::fabs(x[i]) > peak ? std::fabs(x[i]) : peak;
    return peak < 1e-30f ? 0.0f : float_of(bits_of(peak / 127.0f) & ~0x7fu);
  }
  static int code_of(float x, float scale) {
    const float code = scale > 0.0f ? std::nearbyint(x / scale) : 0.0f;
    return code >= 127.0f ? 127 : code >= -127.0f ? static_cast<int>(code) : -127;
  }

  static void write(uint8_t* page, int width, int position, const float* k, const float* v) {
    auto* values = reinterpret_cast<int8_t*>(page + kPage * width);
    auto* both = reinterpret_cast<float*>(page + 2 * kPage * width);
    const float of_key = both[position] = scale_of(k, width), of_value = both[kPage + position] = scale_of(v, width);
    for (int i = 0; i < width; i++) {
      page[(i / 4) * 64 + position * 4 + i % 4] = static_cast<uint8_t>(code_of(k[i], of_key) + 128);
      values[(position / 4) * width * 4 + i * 4 + position % 4] = static_cast<int8_t>(code_of(v[i], of_value));
    }
  }

  static void read(const uint8_t* page, int width, int position, float* k, float* v) {
    const auto* values = reinterpret_cast<const int8_t*>(page + kPage * width);
    const float *of_keys = scales(page, width), *of_values = of_keys + kPage;
    for (int i = 0; i < width; i++) {
      k[i] = of_keys[position] * static_cast<float>(page[(i / 4) * 64 + position * 4 + i % 4] - 128);
      v[i] = of_values[position] * static_cast<float>(values[(position / 4) * width * 4 + i * 4 + position % 4]);
    }
  }

  static void prepare(Queries& q, int query, int width) {
    const float* x = q.plain + query * width;
    F32 peaks = zero();
    for (int i = 0; i < width; i += kLanes) peaks = max(peaks, abs(load(x + i)));
    const float peak = highest(peaks);
    q.scale[query] = peak < 1e-30f ? 0.0f : peak / 127.0f;
    const F32 inverse = splat(peak < 1e-30f ? 0.0f : 127.0f / peak);
    I32 total = splat_i32(0);
    for (int i = 0; i < width; i += kLanes) {
      const I32 codes = round_i32(mul(load(x + i), inverse));
      store_bytes(q.codes + query * width + i, codes);
      total = add(total, codes);
    }
    q.zero[query] = -128 * sum(total);
  }
  static void store_weights(Weights& w, int row, int column, F32 weights) {
    store(w.plain(row) + column, weights);
  }

  template <int N>
  static void score(const uint8_t* page, int width, const Queries& q, int query, Weights& w, int row, int column) {
    I32 dot[N];
    SEGUE_UNROLL for (int i = 0; i < N; i++) dot[i] = splat_i32(q.zero[query + i]);
    const int8_t* x = q.codes + query * width;
    for (int d = 0; d < width; d += 4) {
      const Bytes keys = load_bytes(page + d * 16);
      SEGUE_UNROLL for (int i = 0; i < N; i++) dot[i] = dot_u8s8(dot[i], keys, x + i * width + d);
    }
    const F32 of_keys = load(scales(page, width));
    SEGUE_UNROLL for (int i = 0; i < N; i++)
      store(w.plain(row + i) + column, mul(mul(to_f32(dot[i]), of_keys), splat(q.scale[query + i])));
  }

  // A row's weights of a page times the scales of its values, in their place: 16 bytes of a scale that follows them.
  static void weigh(const uint8_t* page, int width, Weights& w, int row, int column) {
    float* at = w.plain(row) + column;
    const F32 weights = mul(load(at), load(scales(page, width) + kPage));
    const float peak = highest(weights);
    const bool some = peak > 0.0f;
    store_bytes(at, round_i32(mul(weights, splat(some ? 255.0f / peak : 0.0f))));
    at[4] = some ? peak / 255.0f : 0.0f;
  }

  template <int N, int V>
  static void mix(const uint8_t* page, int width, const Weights& w, int row, int column, int channel, float* mixed) {
    const uint8_t* values = page + kPage * width + channel * 4;
    I32 dot[N][V];
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++) dot[i][j] = splat_i32(0);
    const float* weights = w.plain(row) + column;
    SEGUE_UNROLL for (int p = 0; p < 4; p++) SEGUE_UNROLL for (int j = 0; j < V; j++) {
      const Bytes v = load_bytes(values + p * width * 4 + j * 64);
      SEGUE_UNROLL for (int i = 0; i < N; i++)
        dot[i][j] = dot_s8u8(dot[i][j], v, reinterpret_cast<const uint8_t*>(weights + i * Weights::kPitch + p));
    }
    SEGUE_UNROLL for (int i = 0; i < N; i++) SEGUE_UNROLL for (int j = 0; j < V; j++) {
      float* at = mixed + (row + i) * width + channel + j * kLanes;
      store(at, fma(to_f32(dot[i][j]), splat(weights[i * Weights::kPitch + 4]), load(at)));
    }
  }
};

}  // namespace segue
