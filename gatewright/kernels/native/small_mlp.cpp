// A residual MLP, y = u + W2 SiLU(W1 LN(u) + b1) + b2, for many small models at once.
//
// LN is without its affine part, which belongs to W1 and b1.  A tile of rows goes through all
// of it in the first cache; the backward pass recomputes the hidden layer.  A unit of work is
// a block of rows of one member, with its own gradients of the weights.

#include <algorithm>
#include <cstdlib>
#include <omp.h>

#include "layer_norm.h"

extern "C" {
struct SmallMlpArgs {
  int64_t members, rows, width, hidden, block, threads;
  const float *u;       // (members, rows, width)
  const float *up;      // (members, hidden, width)
  const float *up_bias;  // (members, hidden)
  const float *down;    // (members, width, hidden)
  const float *down_bias;
  float *out;
  const float *dout;
  float *du;
  // (members, blocks, ...), padded to 16: (width, hidden), (hidden), (hidden, width), (width)
  float *dup, *dup_bias, *ddown, *ddown_bias;
};
}

namespace {

constexpr int TILE = 32;  // rows

class Worker {
 public:
  explicit Worker(const SmallMlpArgs &args)
      : a(args), D((int)a.width), H((int)a.hidden), dp(padded(D)), hp(padded(H)) {
    pool.begin((size_t)TILE * (3 * dp + 3 * hp + 1) + 6 * (size_t)dp * hp + 4 * (dp + hp) + 1024);
    x = zeros(TILE * dp), dx = zeros(TILE * dp), dy = zeros(TILE * dp), inverse = zeros(TILE);
    pre = zeros(TILE * hp), act = zeros(TILE * hp), dact = zeros(TILE * hp);
    size_t n = (size_t)dp * hp;
    up = zeros(n), up_turned = zeros(n), down = zeros(n), down_turned = zeros(n);
    dup = zeros(n), ddown = zeros(n);
    up_bias = zeros(hp), dup_bias = zeros(hp), down_bias = zeros(dp), ddown_bias = zeros(dp);
  }

  void block(int64_t member, int64_t from, int64_t to, int64_t unit, bool backward) {
    pack(H, D, a.up + member * H * D, D, hp, dp, up);
    pack(D, H, a.down + member * D * H, H, dp, hp, down);
    transpose(hp, dp, up, dp, up_turned, hp);
    transpose(dp, hp, down, hp, down_turned, dp);
    memcpy(up_bias, a.up_bias + member * H, sizeof(float) * H);
    memcpy(down_bias, a.down_bias + member * D, sizeof(float) * D);
    for (float *p : {dup, ddown}) memset(p, 0, sizeof(float) * dp * hp);
    memset(dup_bias, 0, sizeof(float) * hp), memset(ddown_bias, 0, sizeof(float) * dp);
    for (int64_t r = from; r < to; r += TILE) {
      int64_t row = member * a.rows + r;
      int count = (int)std::min<int64_t>(TILE, to - r);
      hidden(row, count);
      if (backward)
        back(row, count);
      else
        forward(row, count);
    }
    if (!backward) return;
    size_t n = (size_t)dp * hp;
    memcpy(a.dup + unit * n, dup, sizeof(float) * n);
    memcpy(a.ddown + unit * n, ddown, sizeof(float) * n);
    memcpy(a.dup_bias + unit * hp, dup_bias, sizeof(float) * hp);
    memcpy(a.ddown_bias + unit * dp, ddown_bias, sizeof(float) * dp);
  }

 private:
  const SmallMlpArgs &a;
  Scratch pool;
  const int D, H, dp, hp;
  float *x, *dx, *dy, *inverse, *pre, *act, *dact, *up, *up_turned, *down, *down_turned;
  float *dup, *ddown, *up_bias, *dup_bias, *down_bias, *ddown_bias;

  static int padded(int n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }
  float *zeros(size_t n) {
    float *p = pool.take(n);
    memset(p, 0, n * sizeof(float));
    return p;
  }

  void hidden(int64_t row, int count) {
    for (int i = 0; i < count; i++) inverse[i] = normalise(a.u + (row + i) * D, D, x + i * dp);
    memset(x + count * dp, 0, sizeof(float) * (TILE - count) * dp);
    for (int i = 0; i < TILE; i++) memcpy(pre + i * hp, up_bias, sizeof(float) * hp);
    gemm<false, ADD>(TILE, hp, dp, x, dp, up_turned, hp, pre, hp);
    for (int i = 0; i < TILE * hp; i += VW) {
      vf v = load(pre + i);
      store(act + i, v * vsigmoid(v));
    }
  }

  void forward(int64_t row, int count) {
    for (int i = 0; i < TILE; i++) memcpy(dy + i * dp, down_bias, sizeof(float) * dp);
    gemm<false, ADD>(TILE, dp, hp, act, hp, down_turned, dp, dy, dp);
    for (int i = 0; i < count; i++) {
      const float *u = a.u + (row + i) * D;
      float *to = a.out + (row + i) * D;
      for (int j = 0; j < D; j++) to[j] = u[j] + dy[i * dp + j];
    }
  }

  void back(int64_t row, int count) {
    pack(count, D, a.dout + row * D, D, TILE, dp, dy);
    gemm<false, SET>(TILE, hp, dp, dy, dp, down, hp, dact, hp);
    gemm<true, ADD>(hp, dp, TILE, act, hp, dy, dp, ddown, dp);
    for (int i = 0; i < TILE * hp; i += VW) {
      vf v = load(pre + i), s = vsigmoid(v);
      store(dact + i, load(dact + i) * s * (1.0f + v * (1.0f - s)));
    }
    gemm<false, SET>(TILE, dp, hp, dact, hp, up, dp, dx, dp);
    gemm<true, ADD>(dp, hp, TILE, x, dp, dact, hp, dup, hp);
    for (int i = 0; i < count; i++) {
      for (int j = 0; j < hp; j += VW)
        store(dup_bias + j, load(dup_bias + j) + load(dact + i * hp + j));
      for (int j = 0; j < dp; j += VW)
        store(ddown_bias + j, load(ddown_bias + j) + load(dy + i * dp + j));
      float *du = a.du + (row + i) * D;
      back_normalise(dx + i * dp, x + i * dp, inverse[i], D, du);
      for (int j = 0; j < D; j++) du[j] += dy[i * dp + j];
    }
  }
};

void all(const SmallMlpArgs &a, bool backward) {
  int64_t blocks = (a.rows + a.block - 1) / a.block, units = a.members * blocks;
  int threads = (int)std::min<int64_t>(a.threads, units);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker worker(a);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units; i++) {
      int64_t from = i % blocks * a.block, to = std::min(from + a.block, a.rows);
      worker.block(i / blocks, from, to, i, backward);
    }
  }
}

}  // namespace

extern "C" {
int64_t small_mlp_args_size() { return sizeof(SmallMlpArgs); }
void small_mlp_forward(const SmallMlpArgs *a) { all(*a, false); }
void small_mlp_backward(const SmallMlpArgs *a) { all(*a, true); }
}
