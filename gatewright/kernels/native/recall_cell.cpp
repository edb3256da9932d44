// A small recurrent cell with its projections, for many models at once.
//
// Input is the residual stream; its LayerNorm (the affine part belongs to the weights), the
// projections and all that recall_cell.h does happen on one sequence in the caches, so that
// only the input, the output and the states at every CHUNK-th token go through memory.  The
// backward pass recomputes the rest.  A unit of work is a block of sequences of one member;
// each block sums its own gradients of the member's parameters, and the caller adds the blocks.

#include <omp.h>

#include "layer_norm.h"
#include "recall_cell.h"

namespace {
using recall_cell::Cell;

// C (rows x n) from A and B; rows beyond the last, up to 16, may be computed too.
template <Acc ACC>
void product(int rows, int n, int k, const float *A, size_t lda, const float *B, size_t ldb,
             float *C, size_t ldc) {
  constexpr int FEW = 6;
  int whole = rows / BLOCK * BLOCK, rest = rows - whole;
  if (rest > FEW) whole += BLOCK, rest = 0;
  gemm<false, ACC>(whole, n, k, A, lda, B, ldb, C, ldc);
  for (int j = 0; j < n && rest; j += BLOCK)
    micro<FEW, BLOCK / VW, false, ACC>(k, A + whole * lda, lda, B + j, ldb, C + whole * ldc + j,
                                       ldc, nullptr);
}

class Worker {
 public:
  explicit Worker(const RecallCellArgs &args)
      : a(args), cell(args), L((int)a.used), D((int)a.width), C((int)a.columns), lp(Cell::up(L)),
        dp(Cell::up(D)), cp(Cell::up(C)) {
    pool.begin((size_t)lp * (2 * dp + 2 * cp + 1) + 3 * dp * cp + 4 * cp + 1024);
    x = zeros((size_t)lp * dp), dx = zeros((size_t)lp * dp), inverse = zeros(lp);
    proj = zeros((size_t)lp * cp), dproj = zeros((size_t)lp * cp);
    weight = zeros((size_t)cp * dp), turned = zeros((size_t)dp * cp);
    dturned = zeros((size_t)dp * cp);
    bias = zeros(cp), dbias = zeros(cp);
  }

  void block(int64_t member, int64_t from, int64_t to, int64_t unit, bool backward) {
    pack(C, D, a.weight + member * C * D, D, cp, dp, weight);
    transpose(cp, dp, weight, dp, turned, cp);
    memcpy(bias, a.bias + member * C, sizeof(float) * C);
    memset(dturned, 0, sizeof(float) * dp * cp);
    memset(dbias, 0, sizeof(float) * cp);
    cell.begin_member(member);
    for (int64_t row = member * a.sequences + from; row < member * a.sequences + to; row++) {
      project(row);
      if (backward)
        back(row);
      else
        cell.forward(row, proj);
    }
    if (!backward) return;
    memcpy(a.dweight + (size_t)unit * dp * cp, dturned, sizeof(float) * dp * cp);
    float *small = a.dsmall + unit * (C + 5 * a.mixed + a.key_width + 2 * a.heads);
    memcpy(small, dbias, sizeof(float) * C);
    cell.end_member(small + C);
  }

 private:
  const RecallCellArgs &a;
  Cell cell;
  Scratch pool;
  const int L, D, C, lp, dp, cp;
  int columns;  // of the current sequence, see `dense`
  float *x, *dx, *inverse, *proj, *dproj, *weight, *turned, *dturned, *bias, *dbias;

  float *zeros(size_t n) {
    float *p = pool.take(n);
    memset(p, 0, n * sizeof(float));
    return p;
  }

  // Columns from here on are projected for the tokens that need q only, if these are few.
  int dense(int64_t row) {
    int needing = cell.mark(row);
    return 2 * needing > L ? cp : std::min(cp, Cell::up(C - (int)a.key_width));
  }

  void project(int64_t row) {
    const float *u = a.u + row * a.tokens * D;
    columns = dense(row);
    for (int t = 0; t < L; t++) {
      inverse[t] = normalise(u + cell.order(t) * D, D, x + t * dp);
      memcpy(proj + t * cp, bias, sizeof(float) * cp);
    }
    product<ADD>(L, columns, dp, x, dp, turned, cp, proj, cp);
    for (int t = 0; t < L; t++)
      for (int j = columns; j < cp && cell.needs_q(t); j += VW) {
        vf total = load(bias + j);
        for (int d = 0; d < D; d++) total += x[t * dp + d] * load(turned + d * cp + j);
        store(proj + t * cp + j, total);
      }
  }

  void back(int64_t row) {
    cell.backward(row, proj, dproj);
    product<SET>(L, dp, columns, dproj, cp, weight, dp, dx, dp);
    gemm<true, ADD>(dp, columns, L, x, dp, dproj, cp, dturned, cp);
    for (int t = 0; t < L; t++)
      if (columns < cp && cell.needs_q(t)) back_q(dproj + t * cp, x + t * dp, dx + t * dp);
    for (int j = 0; j < cp; j += VW) {
      vf total = load(dbias + j);
      for (int t = 0; t < L; t++) total += load(dproj + t * cp + j);
      store(dbias + j, total);
    }
    float *du = a.du + row * a.tokens * D;
    if (L < a.tokens) memset(du, 0, sizeof(float) * a.tokens * D);
    for (int t = 0; t < L; t++)
      back_normalise(dx + t * dp, x + t * dp, inverse[t], D, du + cell.order(t) * D);
  }

  void back_q(const float *from, const float *x, float *dx) {
    for (int c = columns; c < C; c++)
      for (int j = 0; j < dp; j += VW) store(dx + j, load(dx + j) + from[c] * load(weight + c * dp + j));
    for (int d = 0; d < D; d++)
      for (int j = columns; j < cp; j += VW) {
        float *to = dturned + d * cp + j;
        store(to, load(to) + x[d] * load(from + j));
      }
  }
};

void all(const RecallCellArgs &a, bool backward) {
  int64_t blocks = (a.sequences + a.block - 1) / a.block, units = a.members * blocks;
  int threads = (int)std::min<int64_t>(a.threads, units);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker worker(a);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units; i++) {
      int64_t from = i % blocks * a.block, to = std::min(from + a.block, a.sequences);
      worker.block(i / blocks, from, to, i, backward);
    }
  }
}

}  // namespace

extern "C" {
int64_t recall_cell_args_size() { return sizeof(RecallCellArgs); }
void recall_cell_forward(const RecallCellArgs *a) { all(*a, false); }
void recall_cell_backward(const RecallCellArgs *a) { all(*a, true); }
}
