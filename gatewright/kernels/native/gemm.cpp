// Large fp32 matrix products, C = A B or C += A B, with A and B in any layout.
//
// B is packed in slivers of COLS columns, which stream through the first cache; a block of A,
// which stays in the second, is copied as it lies.  ROWS rows of A and a sliver make a tile of
// C in registers.  A thread has rows of C for itself, so the order of sums, and with it the
// result, does not depend on the number of threads.

#include <algorithm>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct GemmArgs {
  int64_t m, n, k, add, threads;
  // Strides are in elements; of a row's and a column's two one is 1.
  const float *a;
  int64_t a_row, a_col;
  const float *b;
  int64_t b_row, b_col;
  float *c;
  int64_t c_row;
};
}

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX__)
constexpr int ROWS = 6, VECTORS = 2;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif
constexpr int COLS = VECTORS * VW;
constexpr int DEPTH = 384;         // of a packed block
constexpr int HEIGHT = 32 * ROWS;  // of a packed block of A
constexpr int WIDTH = 64 * COLS;   // of a packed block of B

// Distances between rows of a copied block: no power of two, so that rows share no cache set.
constexpr int LD_ROWS = DEPTH + 16, LD_COLS = HEIGHT + 16;

int64_t slivers(int64_t n, int width) { return (n + width - 1) / width; }

// Columns j .. j + filled of B, element t of column i at t * COLS + i, zeros beyond `filled`.
void pack_columns(const GemmArgs &a, int64_t k0, int64_t j, int filled, int depth, float *dst) {
  const float *src = a.b + k0 * a.b_row + j * a.b_col;
  if (a.b_col == 1) {
    for (int t = 0; t < depth; t++) {
      const float *row = src + t * a.b_row;
      if (filled == COLS)
        memcpy(dst + t * COLS, row, sizeof(float) * COLS);
      else
        for (int i = 0; i < COLS; i++) dst[t * COLS + i] = i < filled ? row[i] : 0;
    }
    return;
  }
  if (filled < COLS) memset(dst, 0, sizeof(float) * COLS * depth);
  int i = 0, whole = depth / 4 * 4;
  for (; i + 4 <= filled; i += 4) {
    transpose(4, whole, src + i * a.b_col, a.b_col, dst + i, COLS);
    for (int t = whole; t < depth; t++)
      for (int r = 0; r < 4; r++) dst[t * COLS + i + r] = src[(i + r) * a.b_col + t];
  }
  for (; i < filled; i++)
    for (int t = 0; t < depth; t++) dst[t * COLS + i] = src[i * a.b_col + t];
}

// Copies a block of A as it lies, with short rows: `across` of them, `along` floats each.
void copy_block(const float *src, int64_t stride, int64_t across, int64_t along, float *dst,
                int64_t ld) {
  for (int64_t i = 0; i < across; i++) memcpy(dst + i * ld, src + i * stride, sizeof(float) * along);
}

// A tile whose rows or columns reach beyond C goes through a small buffer, as wide as needed.
template <bool TA, int NV>
void partial_tile(int rows, int cols, int depth, bool add, const float *A, int64_t lda,
                  const float *B, float *C, int64_t ldc) {
  if (NV > 1 && cols <= (NV - 1) * VW) {
    partial_tile<TA, (NV > 1 ? NV - 1 : 1)>(rows, cols, depth, add, A, lda, B, C, ldc);
    return;
  }
  alignas(64) float T[ROWS * COLS];
  micro<ROWS, NV, TA, SET>(depth, A, lda, B, COLS, T, COLS, nullptr);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++)
      C[i * ldc + j] = add ? C[i * ldc + j] + T[i * COLS + j] : T[i * COLS + j];
}

template <bool TA>
void tile(int rows, int cols, int depth, bool add, const float *A, int64_t lda, const float *B,
          float *C, int64_t ldc) {
  if (rows == ROWS && cols == COLS) {
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLS; j += 16) __builtin_prefetch(C + i * ldc + j, 1);
    if (add)
      micro<ROWS, VECTORS, TA, ADD>(depth, A, lda, B, COLS, C, ldc, nullptr);
    else
      micro<ROWS, VECTORS, TA, SET>(depth, A, lda, B, COLS, C, ldc, nullptr);
    return;
  }
  partial_tile<TA, VECTORS>(rows, cols, depth, add, A, lda, B, C, ldc);
}

void multiply(const GemmArgs &a, float *packed_b, Scratch &scratch) {
  size_t room = std::max((size_t)HEIGHT * LD_ROWS, (size_t)DEPTH * LD_COLS) + ROWS;
  scratch.begin(room);
  float *packed_a = scratch.take(room);
  int64_t blocks = slivers(a.m, HEIGHT);
  // Fewer, equal blocks where threads would else wait for one another.
  int64_t parts = std::max<int64_t>(blocks, 1);
  parts = (parts + a.threads - 1) / a.threads * a.threads;
  int64_t height = slivers(slivers(a.m, (int)parts), ROWS) * ROWS;
  int64_t even = slivers(a.k, (int)slivers(a.k, DEPTH));
  for (int64_t j0 = 0; j0 < a.n; j0 += WIDTH) {
    int64_t width = std::min<int64_t>(WIDTH, a.n - j0);
    for (int64_t k0 = 0; k0 < a.k; k0 += even) {
      int depth = (int)std::min<int64_t>(even, a.k - k0);
      bool add = a.add || k0 > 0;
#pragma omp for schedule(static)
      for (int64_t s = 0; s < slivers(width, COLS); s++) {
        int64_t j = j0 + s * COLS;
        pack_columns(a, k0, j, (int)std::min<int64_t>(COLS, a.n - j), depth,
                     packed_b + s * COLS * DEPTH);
      }
#pragma omp for schedule(static)
      for (int64_t i0 = 0; i0 < a.m; i0 += height) {
        int64_t rows = std::min(height, a.m - i0);
        const float *block = a.a + i0 * a.a_row + k0 * a.a_col;
        if (a.a_col == 1)
          copy_block(block, a.a_row, rows, depth, packed_a, LD_ROWS);
        else
          copy_block(block, a.a_col, depth, rows, packed_a, LD_COLS);
        for (int64_t s = 0; s < slivers(width, COLS); s++) {
          int64_t j = j0 + s * COLS;
          int cols = (int)std::min<int64_t>(COLS, a.n - j);
          for (int64_t r = 0; r < slivers(rows, ROWS); r++) {
            int64_t i = i0 + r * ROWS;
            int count = (int)std::min<int64_t>(ROWS, a.m - i);
            const float *B = packed_b + s * COLS * DEPTH;
            float *C = a.c + i * a.c_row + j;
            if (a.a_col == 1)
              tile<false>(count, cols, depth, add, packed_a + r * ROWS * LD_ROWS, LD_ROWS, B, C,
                          a.c_row);
            else
              tile<true>(count, cols, depth, add, packed_a + r * ROWS, LD_COLS, B, C, a.c_row);
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" {
int64_t gemm_args_size() { return sizeof(GemmArgs); }
void gemm_f32(const GemmArgs *a) {
  thread_local Scratch shared;
  shared.begin((size_t)WIDTH * DEPTH);
  float *packed_b = shared.take((size_t)WIDTH * DEPTH);
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    thread_local Scratch own;
    multiply(*a, packed_b, own);
  }
}
}
