// Causal attention and its gradients, without the matrix of scores.
//
// One unit of work is a batch row and a key/value head with its queries' heads.  Scores exist
// in blocks of L x L in the first cache; a running maximum and sum per query make softmax of
// them (FlashAttention, Dao et al. 2022, algorithm 1), and the backward pass makes them again
// from what the forward pass kept: the logarithm of each query's sum.  Blocks on the diagonal
// do the lower half of their work only.

#include <algorithm>
#include <cmath>
#include <omp.h>

#include "vec.h"

extern "C" {
struct AttentionArgs {
  int64_t batch, groups, per_group, length, head_dim, threads, bf16;
  double scale;
  // (b, heads, l, p); strides are in elements and the last dimension is contiguous.
  const void *q;
  int64_t q_b, q_h, q_l;
  const void *k;
  int64_t k_b, k_h, k_l;
  const void *v;
  int64_t v_b, v_h, v_l;
  void *o;
  int64_t o_b, o_h, o_l;
  float *lse;  // (b, groups * per_group, l): log of the sum of a query's exponentials
  const void *dout;
  int64_t dout_b, dout_h, dout_l;
  void *dq;
  int64_t dq_b, dq_h, dq_l;
  void *dk;
  int64_t dk_b, dk_h, dk_l;
  void *dv;
  int64_t dv_b, dv_h, dv_l;
};
}

namespace {

constexpr int L = 64;  // queries and keys of a block

template <typename T>
void unpack(int rows, int cols, const float *src, int padded_cols, float factor, T *dst,
            int64_t stride) {
  for (int i = 0; i < rows; i++) {
    const float *s = src + (int64_t)i * padded_cols;
    T *d = dst + i * stride;
    int j = 0;
    for (; j + VW <= cols; j += VW) store(d + j, load(s + j) * factor);
    for (; j < cols; j++) from_float(d + j, s[j] * factor);
  }
}

template <typename T>
struct Attention {
  const AttentionArgs &a;
  int64_t b, g;
  int l, p, P, blocks, rows;  // rows: l padded to whole blocks
  size_t block;               // floats of a block of tokens

  Attention(const AttentionArgs &args, int64_t unit) : a(args) {
    b = unit / a.groups, g = unit % a.groups;
    l = (int)a.length, p = (int)a.head_dim, P = (p + 15) / 16 * 16;
    blocks = (l + L - 1) / L, rows = blocks * L;
    block = (size_t)L * P;
  }

  size_t whole() const { return (size_t)rows * P; }

  void load_head(const void *base, int64_t s_b, int64_t s_h, int64_t s_l, int64_t h,
                 float *to) const {
    pack(l, p, (const T *)base + b * s_b + h * s_h, s_l, rows, P, to);
  }

  // By blocks: (P x L) each.
  void turn(const float *from, float *to) const {
    for (int i = 0; i < blocks; i++) transpose(L, P, from + i * block, P, to + i * block, L);
  }

  void scale(float *x) const {
    float factor = (float)a.scale;
    for (size_t i = 0; i < whole(); i += VW) store(x + i, load(x + i) * factor);
  }

  // S = X YT for queries X (L x P) and keys' YT (P x L); on the diagonal the lower blocks only.
  void scores(bool diagonal, const float *X, const float *YT, float *S) const {
    if (!diagonal) {
      gemm<false, SET>(L, L, P, X, P, YT, L, S, L);
      return;
    }
    for (int r = 0; r < L; r += BLOCK)
      gemm<false, SET>(BLOCK, r + BLOCK, P, X + r * P, P, YT, L, S + r * L, L);
  }

  // Keys that the t-th query of a block looks at, in whole vectors, the last ones masked.
  static int seen(bool diagonal, int t) { return diagonal ? t / BLOCK * BLOCK + BLOCK : L; }

  void forward(Scratch &scratch) const {
    scratch.begin(4 * whole() + block + L * L + 4 * L + 256);
    float *Q = scratch.take(whole()), *K = scratch.take(whole()), *V = scratch.take(whole());
    float *KT = scratch.take(whole()), *O = scratch.take(block), *S = scratch.take(L * L);
    float *top = scratch.take(L), *total = scratch.take(L), *keep = scratch.take(L);
    load_head(a.k, a.k_b, a.k_h, a.k_l, g, K);
    load_head(a.v, a.v_b, a.v_h, a.v_l, g, V);
    turn(K, KT);
    for (int64_t h = g * a.per_group; h < (g + 1) * a.per_group; h++) {
      load_head(a.q, a.q_b, a.q_h, a.q_l, h, Q);
      scale(Q);
      for (int i = 0; i < blocks; i++) {
        std::fill(top, top + L, -INFINITY);
        std::fill(total, total + L, 0.0f);
        memset(O, 0, sizeof(float) * block);
        for (int j = 0; j <= i; j++) {
          scores(i == j, Q + i * block, KT + j * block, S);
          for (int t = 0; t < L; t++) soften(i == j, t, S + t * L, top[t], total[t], keep[t]);
          mix(i == j, S, V + j * block, keep, O);
        }
        int count = std::min(L, l - i * L);
        float *lse = a.lse + (b * a.groups * a.per_group + h) * l + i * L;
        for (int t = 0; t < count; t++) {
          lse[t] = top[t] + std::log(total[t]);
          for (int c = 0; c < P; c += VW) store(O + t * P + c, load(O + t * P + c) / total[t]);
        }
        unpack(count, p, O, P, 1.0f, (T *)a.o + b * a.o_b + h * a.o_h + i * L * a.o_l, a.o_l);
      }
    }
  }

  // Scores of one query become exponentials below a maximum that may have grown; `keep` is
  // what remains of the sums so far.
  static void soften(bool diagonal, int t, float *s, float &top, float &total, float &keep) {
    int n = seen(diagonal, t);
    vf most = splat(-INFINITY);
    for (int c = 0; c < n; c += VW) {
      vf x = load(s + c);
      if (diagonal) x = select(lanes(c) > t, splat(-INFINITY), x), store(s + c, x);
      most = select((vi)(x > most), x, most);
    }
    float high = top;
    for (int c = 0; c < VW; c++) high = std::max(high, most[c]);
    vf sum_of = {};
    for (int c = 0; c < n; c += VW) {
      vf e = vexp(load(s + c) - high);
      store(s + c, e);
      sum_of += e;
    }
    keep = std::exp(top - high);
    total = total * keep + sum(sum_of);
    top = high;
  }

  // O = diag(keep) O + S V.
  void mix(bool diagonal, const float *S, const float *V, const float *keep, float *O) const {
    if (!diagonal) {
      gemm<false, SCALED>(L, P, L, S, L, V, P, O, P, keep);
      return;
    }
    for (int r = 0; r < L; r += BLOCK)
      gemm<false, SCALED>(BLOCK, P, r + BLOCK, S + r * L, L, V, P, O + r * P, P, keep + r);
  }

  // Y += S X.
  void add(bool diagonal, const float *S, const float *X, float *Y) const {
    if (!diagonal) {
      gemm<false, ADD>(L, P, L, S, L, X, P, Y, P);
      return;
    }
    for (int r = 0; r < L; r += BLOCK)
      gemm<false, ADD>(BLOCK, P, r + BLOCK, S + r * L, L, X, P, Y + r * P, P);
  }

  // Y += S^T X.
  void add_turned(bool diagonal, const float *S, const float *X, float *Y) const {
    if (!diagonal) {
      gemm<true, ADD>(L, P, L, S, L, X, P, Y, P);
      return;
    }
    for (int s = 0; s < L; s += BLOCK)
      gemm<true, ADD>(BLOCK, P, L - s, S + s * L + s, L, X + s * P, P, Y + s * P, P);
  }

  void backward(Scratch &scratch) const {
    scratch.begin(9 * whole() + 2 * L * L + 2 * rows + 256);
    float *Q = scratch.take(whole()), *K = scratch.take(whole()), *V = scratch.take(whole());
    float *KT = scratch.take(whole()), *VT = scratch.take(whole()), *dO = scratch.take(whole());
    float *dQ = scratch.take(whole()), *dK = scratch.take(whole()), *dV = scratch.take(whole());
    float *S = scratch.take(L * L), *dS = scratch.take(L * L);
    float *lse = scratch.take(rows), *own = scratch.take(rows);
    load_head(a.k, a.k_b, a.k_h, a.k_l, g, K);
    load_head(a.v, a.v_b, a.v_h, a.v_l, g, V);
    turn(K, KT);
    turn(V, VT);
    memset(dK, 0, sizeof(float) * whole());
    memset(dV, 0, sizeof(float) * whole());
    for (int64_t h = g * a.per_group; h < (g + 1) * a.per_group; h++) {
      load_head(a.o, a.o_b, a.o_h, a.o_l, h, dQ);  // for the moment
      load_head(a.dout, a.dout_b, a.dout_h, a.dout_l, h, dO);
      for (int t = 0; t < rows; t++) {
        vf dot = {};
        for (int c = 0; c < P; c += VW) dot += load(dQ + t * P + c) * load(dO + t * P + c);
        own[t] = sum(dot);
      }
      memcpy(lse, a.lse + (b * a.groups * a.per_group + h) * l, sizeof(float) * l);
      std::fill(lse + l, lse + rows, INFINITY);  // queries of the padding see nothing
      load_head(a.q, a.q_b, a.q_h, a.q_l, h, Q);
      scale(Q);
      memset(dQ, 0, sizeof(float) * whole());
      for (int j = 0; j < blocks; j++)
        for (int i = j; i < blocks; i++) {
          bool diagonal = i == j;
          scores(diagonal, Q + i * block, KT + j * block, S);
          scores(diagonal, dO + i * block, VT + j * block, dS);
          for (int t = 0; t < L; t++)
            slope(diagonal, t, lse[i * L + t], own[i * L + t], S + t * L, dS + t * L);
          add_turned(diagonal, S, dO + i * block, dV + j * block);
          add_turned(diagonal, dS, Q + i * block, dK + j * block);
          add(diagonal, dS, K + j * block, dQ + i * block);
        }
      unpack(l, p, dQ, P, (float)a.scale, (T *)a.dq + b * a.dq_b + h * a.dq_h, a.dq_l);
    }
    unpack(l, p, dK, P, 1.0f, (T *)a.dk + b * a.dk_b + g * a.dk_h, a.dk_l);
    unpack(l, p, dV, P, 1.0f, (T *)a.dv + b * a.dv_b + g * a.dv_h, a.dv_l);
  }

  // Scores become weights; gradients of weights become those of scores.
  static void slope(bool diagonal, int t, float lse, float own, float *s, float *ds) {
    for (int c = 0; c < seen(diagonal, t); c += VW) {
      vf w = vexp(load(s + c) - lse);
      if (diagonal) w = select(lanes(c) > t, vf{}, w);
      store(s + c, w);
      vf d = (load(ds + c) - own) * w;
      store(ds + c, d);
    }
  }
};

template <typename T>
void run(const AttentionArgs &a, bool backward) {
  int64_t units = a.batch * a.groups;
  int threads = (int)std::min<int64_t>(a.threads, units);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; i++) {
    thread_local Scratch scratch;
    Attention<T> one(a, i);
    backward ? one.backward(scratch) : one.forward(scratch);
  }
}

}  // namespace

extern "C" {
int64_t attention_args_size() { return sizeof(AttentionArgs); }
void attention_forward(const AttentionArgs *a) {
  a->bf16 ? run<uint16_t>(*a, false) : run<float>(*a, false);
}
void attention_backward(const AttentionArgs *a) {
  a->bf16 ? run<uint16_t>(*a, true) : run<float>(*a, true);
}
}
