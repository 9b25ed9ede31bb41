// What Python calls. Every function returns 0, or the number of an error that library.py turns into an exception; no
// exception leaves C++. The caller has checked shapes and sizes, and page ids where no Batch is involved.
#include <chrono>
#include <cstring>
#include <memory>
#include <new>

#include "linear.h"
#if defined(SEGUE_AMX)
#include "linear_amx.h"
#endif
#include "pack.h"
#include "sample.h"
#include "step.h"

#define SEGUE_API extern "C" __attribute__((visibility("default")))

namespace segue {
namespace {

struct Runner {
  Runner(const Shape& shape, const float* cos, const float* sin) : model(shape, cos, sin), checker(model), sampler(model.pool) {}

  Step& step() {  // its memory is only needed once the weights are there
    if (!steps) steps = std::make_unique<Step>(model);
    return *steps;
  }

  Model model;
  BatchChecker checker;
  Sampler sampler;
  std::unique_ptr<Step> steps;
};

enum : int { kOk = 0, kNoMemory = 1, kFailed = 2 };

template <class Body>
int guarded(Body body) {
  try {
    body();
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

constexpr size_t kPiece = 1 << 14;  // bytes that a probe reads at once, as long as a linear's

// Reads [begin, end) pieces.
int32_t read_pieces(const uint8_t* data, int begin, int end) {
  constexpr int kStep = 256;
  constexpr int8_t ones[4] = {1, 1, 1, 1};
  I32 total = splat_i32(0);
  for (size_t i = size_t(begin) * kPiece; i < size_t(end) * kPiece; i += kStep) {
    ask_ahead<kStep>(data + i);
    SEGUE_UNROLL for (int j = 0; j < kStep; j += 64) total = dot_u8s8(total, load_bytes(data + i + j), ones);
  }
  return sum(total);
}

// Byte dot products on registers alone: the peak that integer linears are measured against.
int32_t multiply(int64_t rounds) {
  I32 sums[8];
  for (int i = 0; i < 8; i++) sums[i] = splat_i32(i);
  int8_t x[4] = {1, 2, 3, 4};
  const uint8_t bytes[64] = {7};
  const Bytes a = load_bytes(bytes);
  for (int64_t round = 0; round < rounds; round++) SEGUE_UNROLL for (int i = 0; i < 8; i++)
    sums[i] = dot_u8s8(sums[i], a, x);
  for (int i = 1; i < 8; i++) sums[0] = add(sums[0], sums[i]);
  return sum(sums[0]);
}

// The same on tiles of bf16.
int32_t multiply_tiles([[maybe_unused]] int64_t rounds) {
#if defined(SEGUE_AMX)
  use_linear_tiles(kRowTile);
  for (int64_t round = 0; round < rounds; round++) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  release_matrix_unit();
#endif
  return 0;
}

// Work whose result nobody wants, but which must be done.
std::atomic<int32_t> g_sink{0};

template <class Work>
double best_seconds(int repeats, Work work) {
  double best = 1e9;
  for (int i = 0; i < repeats; i++) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    best = std::min(best, seconds_since(begin));
  }
  return best;
}

// Of `work` on each of the runner's threads.
template <class Work>
double best_seconds_of_each(Runner& runner, int repeats, Work work) {
  Pool& pool = runner.model.pool;
  return best_seconds(repeats, [&] { pool.deal(pool.threads(), [&](int, int) { g_sink = work(); }); });
}

}  // namespace
}  // namespace segue

using segue::Runner;

// cos, sin: [context][head_dim / 2]
SEGUE_API int segue_create(const segue::Shape* shape, const float* cos, const float* sin, Runner** runner) {
  return segue::guarded([&] { *runner = new Runner(*shape, cos, sin); });
}

SEGUE_API void segue_destroy(Runner* runner) { delete runner; }

// cores: [threads], each below CPU_SETSIZE
SEGUE_API void segue_keep_workers_on(Runner* runner, const int32_t* cores) {
  runner->model.pool.keep_workers_on(cores);
}

// rows: [count][segue_row_bytes(stored, cols)]
SEGUE_API int segue_set_matrix(Runner* runner, int32_t slot, int32_t layer, int32_t stored, int32_t rounding,
                               const uint8_t* rows, int32_t count, int32_t cols) {
  return segue::guarded([&] {
    segue::Model& model = runner->model;
    model.matrix(static_cast<segue::Slot>(slot), layer) =
        segue::pack(model.pool, model.arena, static_cast<segue::Stored>(stored),
                    static_cast<segue::Rounding>(rounding), rows, count, cols);
  });
}

// The head of a tied model is its embedding.
SEGUE_API void segue_tie_head(Runner* runner) { runner->model.head = runner->model.embed; }

SEGUE_API int segue_set_vector(Runner* runner, int32_t slot, int32_t layer, const float* values, int32_t count) {
  return segue::guarded([&] { runner->model.set_vector(static_cast<segue::Slot>(slot), layer, values, count); });
}

SEGUE_API int64_t segue_row_bytes(int32_t stored, int32_t cols) {
  return static_cast<int64_t>(segue::row_bytes(static_cast<segue::Stored>(stored), cols));
}

SEGUE_API int64_t segue_page_bytes(const Runner* runner) { return static_cast<int64_t>(runner->model.page_bytes()); }

SEGUE_API int64_t segue_weight_bytes(const Runner* runner) { return static_cast<int64_t>(runner->model.arena.used()); }

// out: [cols rounded up to 32], as the kernels see the row
SEGUE_API void segue_unpack_row(Runner* runner, int32_t slot, int32_t layer, int32_t row, float* out) {
  segue::unpack_row(runner->model.matrix(static_cast<segue::Slot>(slot), layer), row, out);
}

// The complaint says what is wrong with the batch; then nothing was computed.
SEGUE_API int segue_forward(Runner* runner, const segue::Batch* batch, segue::Complaint* complaint) {
  return segue::guarded([&] {
    *complaint = runner->checker.check(*batch);
    if (complaint->fault == segue::Fault::none) runner->step().forward(*batch);
  });
}

// One token for each of the draws; rows of `vocab` logits.
SEGUE_API int segue_sample(Runner* runner, const segue::Draw* draws, int32_t count, int32_t vocab, segue::Drawn* drawn) {
  return segue::guarded([&] { runner->sampler.draw(draws, count, vocab, drawn); });
}

SEGUE_API void segue_copy_page(Runner* runner, int64_t source, int64_t target) {
  const size_t bytes = runner->model.page_bytes();
  uint8_t* pages = runner->model.pages.data();
  if (source != target) std::memcpy(pages + target * bytes, pages + source * bytes, bytes);
}

// kv: [2][layers][kv_heads][tokens][head_dim], the first `tokens` positions of a table
SEGUE_API void segue_export(const Runner* runner, const int64_t* pages, int64_t tokens, float* kv) {
  const segue::Model& model = runner->model;
  const int head_dim = model.shape.head_dim;
  const size_t values = size_t(model.shape.layers) * model.shape.kv_heads * tokens * head_dim;
  float k[segue::kMaxWidth], v[segue::kMaxWidth];
  for (int layer = 0; layer < model.shape.layers; layer++)
    for (int head = 0; head < model.shape.kv_heads; head++)
      for (int64_t position = 0; position < tokens; position++, kv += head_dim) {
        const uint8_t* block = model.head_block(layer, head) + pages[position / segue::kPage] * model.page_bytes();
        model.read_position(block, static_cast<int>(position % segue::kPage), k, v);
        std::memcpy(kv, k, sizeof(float) * head_dim);
        std::memcpy(kv + values, v, sizeof(float) * head_dim);
      }
}

// The rest of the last page is zeroed.
SEGUE_API void segue_import(Runner* runner, const int64_t* pages, int64_t tokens, const float* kv) {
  const segue::Model& model = runner->model;
  const int head_dim = model.shape.head_dim;
  const size_t values = size_t(model.shape.layers) * model.shape.kv_heads * tokens * head_dim;
  float k[segue::kMaxWidth] = {}, v[segue::kMaxWidth] = {};
  for (int layer = 0; layer < model.shape.layers; layer++)
    for (int head = 0; head < model.shape.kv_heads; head++)
      for (int64_t position = 0; position < tokens; position++, kv += head_dim) {
        uint8_t* block = model.head_block(layer, head) + pages[position / segue::kPage] * model.page_bytes();
        if (position % segue::kPage == 0) std::memset(block, 0, model.head_bytes());
        std::memcpy(k, kv, sizeof(float) * head_dim);
        std::memcpy(v, kv + values, sizeof(float) * head_dim);
        model.write_position(block, static_cast<int>(position % segue::kPage), k, v);
      }
}

// Fills all pages with one byte, for tests of what stale memory can do.
SEGUE_API void segue_fill_pages(Runner* runner, int32_t byte) {
  std::memset(runner->model.pages.data(), byte, runner->model.page_bytes() * runner->model.shape.num_pages);
}

// Seconds to read `bytes` of memory with the runner's threads, best of `repeats`; for benchmarks.
SEGUE_API double segue_probe_read(Runner* runner, int64_t bytes, int32_t repeats) {
  const int pieces = static_cast<int>(bytes / static_cast<int64_t>(segue::kPiece));
  const segue::Mapping memory(size_t(pieces) * segue::kPiece + 4096);
  std::memset(memory.data(), 1, size_t(pieces) * segue::kPiece);
  return segue::best_seconds(repeats, [&] {
    runner->model.pool.share(
        pieces, [&](int, int begin, int end) { segue::g_sink = segue::read_pieces(memory.data(), begin, end); });
  });
}

// Seconds for `rounds` * 8 byte dot products on each of the runner's threads.
SEGUE_API double segue_probe_multiply(Runner* runner, int64_t rounds, int32_t repeats) {
  return segue::best_seconds_of_each(*runner, repeats, [=] { return segue::multiply(rounds); });
}

// Seconds for `rounds` * 4 products of bf16 tiles, [16][32] times [32][16], on each thread; 0 without a matrix unit.
SEGUE_API double segue_probe_tiles(Runner* runner, int64_t rounds, int32_t repeats) {
  if (!segue::kMatrixUnit) return 0.0;
  return segue::best_seconds_of_each(*runner, repeats, [=] { return segue::multiply_tiles(rounds); });
}

// x: [rows][cols] through a matrix of the model to out: [rows][padded outputs]. Returns the best time, in seconds.
SEGUE_API double segue_linear(Runner* runner, int32_t slot, int32_t layer, const float* x, int32_t rows, float* out,
                              int32_t repeats) {
  const segue::Matrix& matrix = runner->model.matrix(static_cast<segue::Slot>(slot), layer);
  segue::Arena arena;
  const segue::Activations inputs = segue::Activations::take(arena, rows, matrix.groups);
  segue::Needs needs;
  needs.add(matrix);
  std::vector<float> row(size_t(matrix.groups) * segue::kGroup);
  for (int i = 0; i < rows; i++) {
    std::memcpy(row.data(), x + size_t(i) * matrix.cols, sizeof(float) * matrix.cols);
    segue::prepare(inputs, i, needs, row.data());
  }
  const segue::Output output{out, size_t(matrix.pairs) * segue::kPairRows};
  std::vector<segue::LinearScratch> scratch;
  for (int i = 0; i < runner->model.shape.threads; i++)
    scratch.push_back(segue::LinearScratch::take(arena, matrix.groups));
  return segue::best_seconds(repeats, [&] {
    runner->model.pool.share(matrix.pairs, [&](int thread, int begin, int end) {
      segue::linear_pairs(matrix, begin, end, inputs, rows, output, scratch[thread]);
    });
  });
}
