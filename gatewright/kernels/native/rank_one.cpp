// The rank-one recurrence over rows of sequences, its inputs given: q, k, v, log decays, and
// either a and b or DELTA's beta.  A row is a unit of work; see rank_one.h.

#include <algorithm>
#include <cstdlib>
#include <omp.h>

#include "rank_one.h"

extern "C" {
struct RankOneArgs {
  int64_t rows, length, key_width, value_width, rank, decay_width, threads;
  const float *q, *k, *v, *log_w, *a, *b, *beta;  // (rows, length, width), contiguous
  float *o, *removed, *checkpoints;
  const float *dout;
  float *dq, *dk, *dv, *dlog_w, *da, *db, *dbeta;
};
}

namespace {
using namespace rank_one;

struct Row {
  const RankOneArgs &x;
  int K, V, L, kp, vp, chunks;
  Decay decay;
  Row(const RankOneArgs &args) : x(args) {
    K = (int)x.key_width, V = (int)x.value_width, L = (int)x.length;
    kp = padded_width(K), vp = padded_rows(V), chunks = (L + CHUNK - 1) / CHUNK;
    decay = x.log_w || x.rank != DELTA ? VECTOR : NONE;
  }

  size_t scratch() const {
    return (size_t)L * (10 * (kp + 16) + 5 * (vp + 16)) + (CHUNK + 1) * 8 * kp + 4096;
  }

  const float *packed(Scratch &pool, const float *from, int64_t row, int width, int padded) const {
    if (!from) return nullptr;
    from += (size_t)row * L * width;
    if (width == padded) return from;
    float *to = pool.take((size_t)L * padded);
    pack(L, width, from, width, L, padded, to);
    return to;
  }

  const float *decays(Scratch &pool, int64_t row) const {
    if (decay == NONE) return nullptr;
    float *w = pool.take((size_t)L * kp);
    for (int t = 0; t < L; t++)
      for (int j = 0; j < kp; j += VW) {
        vf v = {};
        if (x.log_w) {
          const float *from = x.log_w + ((size_t)row * L + t) * x.decay_width;
          if (x.decay_width == 1)
            v = splat(from[0]);
          else
            for (int i = 0; i < VW && j + i < K; i++) v[i] = from[j + i];
        }
        store(w + t * kp + j, vexp(v));
      }
    return w;
  }

  Sequence sequence(Scratch &pool, int64_t row) const {
    Sequence s = {};
    s.length = L, s.kp = kp, s.vp = vp;
    s.q = packed(pool, x.q, row, K, kp);
    s.k = packed(pool, x.k, row, K, kp);
    s.a = packed(pool, x.a, row, K, kp);
    s.b = packed(pool, x.b, row, K, kp);
    s.v = packed(pool, x.v, row, V, vp);
    s.w = decays(pool, row);
    s.beta = x.beta ? x.beta + row * L : nullptr;
    s.removed = x.removed ? x.removed + (size_t)row * L * vp : nullptr;
    s.checkpoints = x.checkpoints ? x.checkpoints + (size_t)row * chunks * vp * kp : nullptr;
    return s;
  }

  void forward(Scratch &pool, int64_t row) const {
    Sequence s = sequence(pool, row);
    float *o = x.o + (size_t)row * L * V;
    s.o = V == vp ? o : pool.take((size_t)L * vp);
    run(s, (Rank)x.rank, decay, false);
    if (s.o != o)
      for (int t = 0; t < L; t++) memcpy(o + t * V, s.o + t * vp, sizeof(float) * V);
  }

  static float *zeros(Scratch &pool, size_t n) {
    float *p = pool.take(n);
    memset(p, 0, n * sizeof(float));
    return p;
  }

  void unpack(const float *from, int padded, float *to, int64_t row, int width) const {
    for (int t = 0; t < L; t++)
      memcpy(to + ((size_t)row * L + t) * width, from + (size_t)t * padded, sizeof(float) * width);
  }

  void backward(Scratch &pool, int64_t row) const {
    Sequence s = sequence(pool, row);
    s.dout = packed(pool, x.dout, row, V, vp);
    s.dq = zeros(pool, (size_t)L * kp);
    s.dk = zeros(pool, (size_t)L * kp);
    if (x.rank == GENERAL) s.da = zeros(pool, (size_t)L * kp), s.db = zeros(pool, (size_t)L * kp);
    if (decay == VECTOR) s.dw = zeros(pool, (size_t)L * kp);
    s.dv = pool.take((size_t)L * vp);
    s.states = pool.take((size_t)(CHUNK + 1) * 8 * kp);
    run(s, (Rank)x.rank, decay, true);
    if (x.rank == DELTA)
      for (int t = 0; t < L; t++) {
        float total = 0, *dv = s.dv + (size_t)t * vp;
        for (int i = 0; i < V; i++) {
          total += dv[i] * s.removed[(size_t)t * vp + i];
          dv[i] *= s.beta[t];
        }
        x.dbeta[row * L + t] = total;
      }
    unpack(s.dq, kp, x.dq, row, K);
    unpack(s.dk, kp, x.dk, row, K);
    unpack(s.dv, vp, x.dv, row, V);
    if (x.rank == GENERAL) unpack(s.da, kp, x.da, row, K), unpack(s.db, kp, x.db, row, K);
    if (!x.log_w) return;
    for (int t = 0; t < L; t++) {
      float *to = x.dlog_w + ((size_t)row * L + t) * x.decay_width, total = 0;
      for (int j = 0; j < K; j++) {
        float d = s.dw[(size_t)t * kp + j] * s.w[(size_t)t * kp + j];
        total += d;
        if (x.decay_width != 1) to[j] = d;
      }
      if (x.decay_width == 1) to[0] = total;
    }
  }
};

void all(const RankOneArgs &a, bool backward) {
  Row row(a);
  int threads = (int)std::min<int64_t>(a.threads, a.rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Scratch pool;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.rows; i++) {
      pool.begin(row.scratch());
      if (backward)
        row.backward(pool, i);
      else
        row.forward(pool, i);
    }
  }
}

}  // namespace

extern "C" {
int64_t rank_one_args_size() { return sizeof(RankOneArgs); }
int64_t rank_one_max_width() { return rank_one::MAX_VECTORS * VW; }
int64_t rank_one_padded_width(int64_t width) { return rank_one::padded_width((int)width); }
int64_t rank_one_padded_rows(int64_t rows) { return rank_one::padded_rows((int)rows); }
int64_t rank_one_chunk() { return rank_one::CHUNK; }
void rank_one_forward(const RankOneArgs *a) { all(*a, false); }
void rank_one_backward(const RankOneArgs *a) { all(*a, true); }
}
