// The recurrence of rank_one.h on one sequence.
//
// Rows of S never meet: a tile of rows goes through the whole sequence with its state in
// registers, and a token's row sums (the dots with S) are one transposing reduction.  At the
// sizes this is made for (keys of at most 64) it does fewer multiply-adds than a chunked form.
// The forward pass keeps the state at every CHUNK-th token and what each token removes; the
// backward pass recomputes a chunk's states into scratch from these and goes back through it.

#include "rank_one.h"

#include <algorithm>

namespace rank_one {
namespace {

constexpr int rows_of(int vectors) { return vectors * 8 <= 16 ? 8 : 4; }

// out[i] = sum of p[i], i < N.
template <int N>
INLINE void row_sums(const vf *p, float *out) {
#if defined(__AVX512F__)
  static_assert(N == 4 || N == 8);
  __m512 four[2];
#pragma GCC unroll 2
  for (int g = 0; g < N / 4; g++) {
    __m512 a = (__m512)p[4 * g], b = (__m512)p[4 * g + 1];
    __m512 c = (__m512)p[4 * g + 2], d = (__m512)p[4 * g + 3];
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
    __m512d high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    four[g] = _mm512_add_ps((__m512)low, (__m512)high);
  }
  // four[g] holds [a b c d] in each of its quarters
  if (N == 4) {
    __m512 x = _mm512_add_ps(four[0], _mm512_shuffle_f32x4(four[0], four[0], 0x4e));
    __m128 y = _mm512_castps512_ps128(_mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1)));
    _mm_storeu_ps(out, y);
  } else {
    __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[N / 4 - 1], 0x88),
                             _mm512_shuffle_f32x4(four[0], four[N / 4 - 1], 0xdd));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0x08)));
  }
#else
  for (int i = 0; i < N; i++) out[i] = sum(p[i]);
#endif
}

#define METHOD inline __attribute__((always_inline))
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)
#define EACH_VECTOR _Pragma("GCC unroll 8") for (int j = 0; j < KV; j++)

template <int KV, Rank RANK, Decay DECAY>
struct Tile {
  static constexpr int ROWS = rows_of(KV);
  const Sequence s;  // a copy that no store can alias, so that it stays in registers
  int r0;  // the tile's first value row
  vf S[ROWS][KV];

  METHOD void vectors(const float *row, vf *out) {
    EACH_VECTOR out[j] = load(row + j * VW);
  }
  // out[r] = S_r . x
  METHOD void dots(const vf (*M)[KV], const vf *x, float *out) {
    vf p[ROWS];
    EACH_ROW {
      p[r] = M[r][0] * x[0];
      _Pragma("GCC unroll 8") for (int j = 1; j < KV; j++) p[r] += M[r][j] * x[j];
    }
    row_sums<ROWS>(p, out);
  }

  METHOD void decay(int t) {
    if (DECAY == VECTOR) {
      vf w[KV];
      vectors(s.w + t * s.kp, w);
      EACH_ROW EACH_VECTOR S[r][j] *= w[j];
    } else if (DECAY == HEAD) {
      vf w = splat(s.w[t * s.heads + r0 / s.head_rows]);
      EACH_ROW EACH_VECTOR S[r][j] *= w;
    }
  }

  // S += v k^T, or beta e k^T; `removed` is known.
  METHOD void write(int t, const vf *k) {
    const float *x = (RANK == DELTA ? s.removed : s.v) + t * s.vp + r0;
    float beta = RANK == DELTA ? s.beta[t] : 1.0f;
    EACH_ROW {
      vf value = splat(RANK == DELTA ? beta * x[r] : x[r]);
      EACH_VECTOR S[r][j] += value * k[j];
    }
  }
  METHOD void remove(int t) {
    vf b[KV];
    vectors(s.b + t * s.kp, b);
    const float *u = s.removed + t * s.vp + r0;
    EACH_ROW {
      vf value = splat(u[r]);
      EACH_VECTOR S[r][j] -= value * b[j];
    }
  }

  METHOD void forward() {
    EACH_ROW EACH_VECTOR S[r][j] = vf{};
    for (int t = 0; t < s.length; t++) {
      if (s.checkpoints && t % CHUNK == 0) keep(s.checkpoints + (size_t)(t / CHUNK) * s.vp * s.kp + r0 * s.kp);
      vf k[KV];
      vectors(s.k + t * s.kp, k);
      float *removed = s.removed + t * s.vp + r0;
      if (RANK == GENERAL) {
        vf a[KV];
        vectors(s.a + t * s.kp, a);
        dots(S, a, removed);
      }
      decay(t);
      if (RANK == DELTA) {
        alignas(64) float u[ROWS];
        dots(S, k, u);
        const float *v = s.v + t * s.vp + r0;
        _Pragma("GCC ivdep") for (int r = 0; r < ROWS; r++) removed[r] = v[r] - u[r];
      }
      if (RANK == GENERAL) remove(t);
      write(t, k);
      if (!s.read || s.read[t]) {
        vf q[KV];
        vectors(s.q + t * s.kp, q);
        dots(S, q, s.o + t * s.vp + r0);
      }
    }
  }

  METHOD void keep(float *to) {
    EACH_ROW EACH_VECTOR store(to + r * s.kp + j * VW, S[r][j]);
  }

  // states[i]: the state before the chunk's token i; the last one after the chunk.
  void recompute(int from, int to) {
    const float *start = s.checkpoints + (size_t)(from / CHUNK) * s.vp * s.kp + r0 * s.kp;
    EACH_ROW EACH_VECTOR S[r][j] = load(start + r * s.kp + j * VW);
    for (int t = from; t < to; t++) {
      keep(s.states + (size_t)(t - from) * ROWS * s.kp);
      vf k[KV];
      vectors(s.k + t * s.kp, k);
      decay(t);
      if (RANK == GENERAL) remove(t);
      write(t, k);
    }
    keep(s.states + (size_t)(to - from) * ROWS * s.kp);
  }

  // total += sum over rows of factor_r M_r
  METHOD void weighted(const float *factor, float scale, const vf (*M)[KV], vf *total) {
    EACH_ROW {
      vf f = splat(factor[r] * scale);
      EACH_VECTOR total[j] += f * M[r][j];
    }
  }
  METHOD void weighted(const float *factor, float scale, const float *M, vf *total) {
    EACH_ROW {
      vf f = splat(factor[r] * scale);
      EACH_VECTOR total[j] += f * load(M + r * s.kp + j * VW);
    }
  }
  METHOD void add(float *to, const vf *x) {
    EACH_VECTOR store(to + j * VW, load(to + j * VW) + x[j]);
  }

  // G is the gradient of the state; it takes S's registers.
  METHOD void back(int t, const float *before, vf (*G)[KV]) {
    size_t row = (size_t)t * s.kp;
    vf k[KV], dk[KV] = {};
    vectors(s.k + row, k);
    if (!s.read || s.read[t]) {
      vf q[KV], dq[KV] = {};
      vectors(s.q + row, q);
      const float *dout = s.dout + t * s.vp + r0;
      EACH_ROW {
        vf f = splat(dout[r]);
        EACH_VECTOR G[r][j] += f * q[j];
      }
      weighted(dout, 1.0f, before + ROWS * s.kp, dq);
      add(s.dq + row, dq);
    }
    float *dv = s.dv + t * s.vp + r0;
    dots(G, k, dv);
    alignas(64) float du[ROWS];
    vf mixed[KV] = {};  // sum over rows of du_r S_{t-1, r}
    if (RANK == DELTA) {
      float beta = s.beta[t];
      _Pragma("GCC ivdep") for (int r = 0; r < ROWS; r++) du[r] = -beta * dv[r];
      weighted(s.removed + t * s.vp + r0, beta, G, dk);
      weighted(du, 1.0f, before, mixed);
      EACH_ROW {
        vf f = splat(du[r]);
        EACH_VECTOR G[r][j] += f * k[j];
      }
    } else {
      weighted(s.v + t * s.vp + r0, 1.0f, G, dk);
    }
    if (RANK == GENERAL) {
      vf b[KV], db[KV] = {};
      vectors(s.b + row, b);
      dots(G, b, du);
      _Pragma("GCC ivdep") for (int r = 0; r < ROWS; r++) du[r] = -du[r];
      weighted(s.removed + t * s.vp + r0, -1.0f, G, db);
      weighted(du, 1.0f, before, mixed);
      add(s.da + row, mixed);
      add(s.db + row, db);
    }
    if (DECAY == VECTOR) {
      vf w[KV], dw[KV] = {};
      vectors(s.w + row, w);
      EACH_ROW EACH_VECTOR dw[j] += G[r][j] * load(before + r * s.kp + j * VW);
      add(s.dw + row, dw);
      EACH_ROW EACH_VECTOR G[r][j] *= w[j];
      if (RANK == DELTA) EACH_VECTOR mixed[j] *= w[j];
    } else if (DECAY == HEAD) {
      int head = t * s.heads + r0 / s.head_rows;
      vf w = splat(s.w[head]), dw = {};
      EACH_ROW EACH_VECTOR dw += G[r][j] * load(before + r * s.kp + j * VW);
      s.dw[head] += sum(dw);
      EACH_ROW EACH_VECTOR G[r][j] *= w;
    }
    if (RANK == DELTA) EACH_VECTOR dk[j] += mixed[j];
    add(s.dk + row, dk);
    if (RANK == GENERAL) {
      vf a[KV];
      vectors(s.a + row, a);
      EACH_ROW {
        vf f = splat(du[r]);
        EACH_VECTOR G[r][j] += f * a[j];
      }
    }
  }

  METHOD void backward() {
    alignas(64) float kept[ROWS * KV * VW] = {};
    for (int from = (s.length - 1) / CHUNK * CHUNK; from >= 0; from -= CHUNK) {
      int to = std::min(from + CHUNK, s.length);
      recompute(from, to);
      vf G[ROWS][KV];
      EACH_ROW EACH_VECTOR G[r][j] = load(kept + (r * KV + j) * VW);
      for (int t = to - 1; t >= from; t--) back(t, s.states + (size_t)(t - from) * ROWS * s.kp, G);
      EACH_ROW EACH_VECTOR store(kept + (r * KV + j) * VW, G[r][j]);
    }
  }
};

template <int KV, Rank RANK, Decay DECAY>
static void tiles(const Sequence &s, bool backward) {
  using T = Tile<KV, RANK, DECAY>;
  for (int r = 0; r < s.vp; r += T::ROWS) {
    T tile{s, r, {}};
    if (backward)
      tile.backward();
    else
      tile.forward();
  }
}

template <int KV>
static void run(const Sequence &s, Rank rank, Decay decay, bool backward) {
  if (rank == DELTA)
    decay == NONE ? tiles<KV, DELTA, NONE>(s, backward) : tiles<KV, DELTA, VECTOR>(s, backward);
  else if (rank == GENERAL)
    tiles<KV, GENERAL, VECTOR>(s, backward);
  else
    decay == HEAD ? tiles<KV, DIAGONAL, HEAD>(s, backward)
                  : tiles<KV, DIAGONAL, VECTOR>(s, backward);
}

}  // namespace

void run(const Sequence &s, Rank rank, Decay decay, bool backward) {
  int vectors = s.kp / VW;
  if (vectors == 1) run<1>(s, rank, decay, backward);
  if (vectors == 2) run<2>(s, rank, decay, backward);
  if (vectors == 4) run<4>(s, rank, decay, backward);
  if (MAX_VECTORS == 8 && vectors == 8) run<MAX_VECTORS>(s, rank, decay, backward);
}

}  // namespace rank_one
