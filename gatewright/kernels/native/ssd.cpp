// The SSD scan of Mamba-2 and its gradients, for CPUs.
//
// One unit of work is a batch row, a group and some of its heads; it walks the chunks in order
// (backwards for the gradients) with everything it touches in cache.  Within a chunk of L
// tokens, for one head with state S (n x p) before the chunk, u_s = dt_s x_s, and cum the
// running sum of dt A:
//
//   y_t = sum_{s<=t} E_ts (C_t . B_s) u_s + exp(cum_t) C_t S,   E_ts = exp(cum_t - cum_s)
//   S'  = exp(cum_L) S + sum_s exp(cum_L - cum_s) B_s u_s^T
//
// E costs few exponentials: inside a block of 16 tokens row t is row t-1 times exp(a_t); left
// of it E is an outer product of decays to and from the block's border, both at most 1.
// cum is summed in double, because under strong gates it is large and its differences small.
//
// The gradient of a_t = dt_t A adds up, over every pair s < t <= r, what passes through E_rs,
// and what passes through the state; nothing is subtracted, so nothing cancels.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct SsdArgs {
  int64_t batch, length, heads, head_dim, groups, d_state;
  int64_t chunk, keep_every, splits, threads, bf16;
  // Pointers; strides are in elements and the last dimension is contiguous.
  const void *x;
  int64_t x_b, x_l, x_h;
  const void *B;
  int64_t B_b, B_l, B_g;
  const void *C;
  int64_t C_b, C_l, C_g;
  const float *dt;         // (b, l, h)
  const float *A;          // (h)
  const float *D;          // (h, p) or null
  const float *initial;    // (b, h, p, n) or null
  const int32_t *segment;  // (b, l), runs numbered from 0, or null
  void *y;
  int64_t y_b, y_l, y_h;
  float *final_state;  // (b, h, p, n) or null
  float *kept;         // (b, h, ceil(chunks / keep_every), padded n, padded p) or null
  // gradients
  const void *dy;
  int64_t dy_b, dy_l, dy_h;
  const float *dfinal;  // (b, h, p, n) or null
  void *dx;
  int64_t dx_b, dx_l, dx_h;
  float *ddt;       // (b, l, h)
  float *dB, *dC;   // (splits, b, l, g, n)
  double *dA, *dD;  // (b, h), (b, h, p) or null
  float *dinitial;  // (b, h, p, n) or null
};
}

namespace {

constexpr int MAX_L = 64;

inline int pad16(int64_t v) { return (int)((v + 15) / 16 * 16); }

// What dt, A and the segments alone decide, for one head and one chunk.
struct Decay {
  alignas(64) float dt[MAX_L], enter[MAX_L], leave[MAX_L];
  alignas(64) float step[MAX_L];              // exp(a_t), 0 at a reset
  alignas(64) float row[MAX_L];               // decay from the border of t's block to t
  alignas(64) float col[MAX_L / BLOCK][MAX_L];  // decay from s to the border of block i
  float whole;
};

void exp_array(int n, float *v) {
  for (int i = 0; i < n; i += VW) store(v + i, vexp(load(v + i)));
}

// k tokens, L = k padded to 16.  dt is strided by `heads`; seg may be null; seg_in is the run
// of the token before the chunk.
void decays(int k, int L, const float *dt, int64_t heads, double A, const int32_t *seg,
            int32_t seg_in, Decay &d) {
  double cum[MAX_L], total = 0;
  for (int t = 0; t < L; t++) {
    d.dt[t] = t < k ? dt[t * heads] : 0.0f;
    double a = (double)d.dt[t] * A;
    total += a;
    cum[t] = total;
    d.step[t] = (float)a;
    d.enter[t] = (float)total;
  }
  for (int t = 0; t < L; t++) d.leave[t] = (float)(total - cum[t]);
  for (int i = 0; i < L / BLOCK; i++) {
    double border = i ? cum[i * BLOCK - 1] : 0.0;
    for (int t = i * BLOCK; t < (i + 1) * BLOCK; t++) d.row[t] = (float)(cum[t] - border);
    for (int s = 0; s < i * BLOCK; s++) d.col[i][s] = (float)(border - cum[s]);
    exp_array(i * BLOCK, d.col[i]);
  }
  exp_array(L, d.step);
  exp_array(L, d.enter);
  exp_array(L, d.leave);
  exp_array(L, d.row);
  d.whole = (float)std::exp(total);
  if (!seg) return;
  auto run = [&](int t) { return seg[std::min(t, k - 1)]; };
  int32_t last = run(k - 1);
  for (int t = 0; t < L; t++) {
    if (run(t) != (t ? run(t - 1) : seg_in)) d.step[t] = 0;
    if (run(t) != seg_in) d.enter[t] = 0;
    if (run(t) != last) d.leave[t] = 0;
    int border = t / BLOCK * BLOCK - 1;
    if (border >= 0 && run(t) != run(border)) d.row[t] = 0;
  }
  for (int i = 1; i < L / BLOCK; i++)
    for (int s = 0; s < i * BLOCK; s++)
      if (run(s) != run(i * BLOCK - 1)) d.col[i][s] = 0;
  if (last != seg_in) d.whole = 0;
}

// Lower blocks of E (when wanted) and of M = CB * E; both L x L with leading dimension L.
template <bool WITH_E>
void decay_product(int L, const Decay &d, const float *CB, float *E, float *M) {
  for (int i = 0; i < L / BLOCK; i++) {
    vf diagonal[BLOCK / VW] = {};
    for (int t = i * BLOCK; t < (i + 1) * BLOCK; t++) {
      const float *cb = CB + t * L;
      float *m = M + t * L, *e = E + t * L;
      vf r = splat(d.row[t]);
      for (int s = 0; s < i * BLOCK; s += VW) {
        vf v = r * load(d.col[i] + s);
        if (WITH_E) store(e + s, v);
        store(m + s, v * load(cb + s));
      }
      for (int q = 0; q < BLOCK / VW; q++) {
        int s = i * BLOCK + q * VW;
        diagonal[q] *= d.step[t];
        diagonal[q] = select(lanes(s) == t, splat(1.0f), diagonal[q]);
        if (WITH_E) store(e + s, diagonal[q]);
        store(m + s, diagonal[q] * load(cb + s));
      }
    }
  }
}

void scale_rows(int rows, int cols, const float *f, float *M) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j += VW) store(M + i * cols + j, load(M + i * cols + j) * f[i]);
}

void scale_cols(int rows, int cols, const float *f, float *M) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j += VW)
      store(M + i * cols + j, load(M + i * cols + j) * load(f + j));
}

// (p, n) in memory <-> (Np, Pp) padded scratch.
void load_state(int p, int n, int Pp, int Np, const float *src, float *S) {
  memset(S, 0, sizeof(float) * Np * Pp);
  for (int i = 0; i < p; i++)
    for (int j = 0; j < n; j++) S[j * Pp + i] = src[i * n + j];
}
void store_state(int p, int n, int Pp, const float *S, float *dst) {
  for (int i = 0; i < p; i++)
    for (int j = 0; j < n; j++) dst[i * n + j] = S[j * Pp + i];
}

struct Unit {
  int64_t b, g, h0, h1, split;
};

Unit unit_of(const SsdArgs &a, int64_t index) {
  int64_t per_group = a.heads / a.groups;
  Unit u;
  u.split = index % a.splits;
  u.g = index / a.splits % a.groups;
  u.b = index / a.splits / a.groups;
  u.h0 = u.g * per_group + per_group * u.split / a.splits;
  u.h1 = u.g * per_group + per_group * (u.split + 1) / a.splits;
  return u;
}

template <typename T>
struct Scan {
  const SsdArgs &a;
  Unit u;
  int P, N, Pp, Np;
  int64_t chunks, keeps;
  const T *x, *B, *C;
  const float *dt;
  const int32_t *seg;

  Scan(const SsdArgs &args, int64_t index) : a(args), u(unit_of(args, index)) {
    P = (int)a.head_dim, N = (int)a.d_state, Pp = pad16(P), Np = pad16(N);
    chunks = (a.length + a.chunk - 1) / a.chunk;
    keeps = (chunks + a.keep_every - 1) / a.keep_every;
    x = (const T *)a.x + u.b * a.x_b;
    B = (const T *)a.B + u.b * a.B_b + u.g * a.B_g;
    C = (const T *)a.C + u.b * a.C_b + u.g * a.C_g;
    dt = a.dt + u.b * a.length * a.heads;
    seg = a.segment ? a.segment + u.b * a.length : nullptr;
  }

  int tokens(int64_t c) const { return (int)std::min<int64_t>(a.chunk, a.length - c * a.chunk); }

  void decay(int64_t c, int64_t h, int k, int L, Decay &d) const {
    int64_t t0 = c * a.chunk;
    const int32_t *s = seg ? seg + t0 : nullptr;
    decays(k, L, dt + t0 * a.heads + h, a.heads, a.A[h], s, seg ? seg[t0 ? t0 - 1 : 0] : 0, d);
  }

  float *kept(int64_t h, int64_t block) const {
    return a.kept + ((u.b * a.heads + h) * keeps + block) * Np * Pp;
  }

  const float *state_in(const float *base, int64_t h) const {
    return base + (u.b * a.heads + h) * P * N;
  }

  // U = dt * x for one head and chunk, L x Pp.
  void pack_u(int64_t t0, int64_t h, int k, int L, const Decay &d, float *U) const {
    pack(k, P, x + t0 * a.x_l + h * a.x_h, a.x_l, L, Pp, U);
    scale_rows(L, Pp, d.dt, U);
  }

  void forward(Scratch &scratch) {
    int64_t nh = u.h1 - u.h0;
    int L0 = (int)a.chunk;
    scratch.begin(nh * Np * Pp + 3 * L0 * Np + 2 * L0 * L0 + 2 * L0 * Pp + Np + 256);
    float *S = scratch.take(nh * Np * Pp);
    float *Bc = scratch.take(L0 * Np), *Cc = scratch.take(L0 * Np), *BT = scratch.take(L0 * Np);
    float *CB = scratch.take(L0 * L0), *M = scratch.take(L0 * L0);
    float *U = scratch.take(L0 * Pp), *Y = scratch.take(L0 * Pp), *whole = scratch.take(Np);
    Decay d;
    for (int64_t h = u.h0; h < u.h1; h++) {
      float *Sh = S + (h - u.h0) * Np * Pp;
      if (a.initial)
        load_state(P, N, Pp, Np, state_in(a.initial, h), Sh);
      else
        memset(Sh, 0, sizeof(float) * Np * Pp);
    }
    for (int64_t c = 0; c < chunks; c++) {
      int k = tokens(c), L = pad16(k);
      int64_t t0 = c * a.chunk;
      pack(k, N, B + t0 * a.B_l, a.B_l, L, Np, Bc);
      pack(k, N, C + t0 * a.C_l, a.C_l, L, Np, Cc);
      transpose(L, Np, Bc, Np, BT, L);
      for (int i = 0; i < L; i += BLOCK)
        gemm<false, SET>(BLOCK, i + BLOCK, Np, Cc + i * Np, Np, BT, L, CB + i * L, L);
      for (int64_t h = u.h0; h < u.h1; h++) {
        float *Sh = S + (h - u.h0) * Np * Pp;
        if (a.kept && c % a.keep_every == 0)
          memcpy(kept(h, c / a.keep_every), Sh, sizeof(float) * Np * Pp);
        decay(c, h, k, L, d);
        decay_product<false>(L, d, CB, M, M);
        pack_u(t0, h, k, L, d, U);
        gemm<false, SET>(L, Pp, Np, Cc, Np, Sh, Pp, Y, Pp);
        for (int i = 0; i < L; i += BLOCK)
          gemm<false, SCALED>(BLOCK, Pp, i + BLOCK, M + i * L, L, U, Pp, Y + i * Pp, Pp,
                              d.enter + i);
        write_y(t0, h, k, Y);
        scale_rows(L, Pp, d.leave, U);
        std::fill(whole, whole + Np, d.whole);
        gemm<true, SCALED>(Np, Pp, L, Bc, Np, U, Pp, Sh, Pp, whole);
      }
    }
    if (a.final_state)
      for (int64_t h = u.h0; h < u.h1; h++)
        store_state(P, N, Pp, S + (h - u.h0) * Np * Pp,
                    a.final_state + (u.b * a.heads + h) * P * N);
  }

  void write_y(int64_t t0, int64_t h, int k, const float *Y) const {
    const float *D = a.D ? a.D + h * P : nullptr;
    for (int t = 0; t < k; t++) {
      const T *xt = x + (t0 + t) * a.x_l + h * a.x_h;
      T *yt = (T *)a.y + u.b * a.y_b + (t0 + t) * a.y_l + h * a.y_h;
      const float *v = Y + t * Pp;
      int j = 0;
      if (D) {
        for (; j + VW <= P; j += VW) store(yt + j, load(v + j) + load(D + j) * load(xt + j));
        for (; j < P; j++) from_float(yt + j, v[j] + D[j] * to_float(xt[j]));
      } else {
        for (; j + VW <= P; j += VW) store(yt + j, load(v + j));
        for (; j < P; j++) from_float(yt + j, v[j]);
      }
    }
  }

  void backward(Scratch &scratch) {
    int64_t nh = u.h1 - u.h0, K = a.keep_every;
    int L0 = (int)a.chunk;
    size_t SP = (size_t)Np * Pp;
    scratch.begin((K + 1) * nh * SP + 7 * (size_t)L0 * Np + 5 * L0 * L0 + 6 * L0 * Pp + Np +
                  2 * nh * Pp + 2 * nh + 4096);
    float *dS = scratch.take(nh * SP), *states = scratch.take(K * nh * SP);
    float *Bc = scratch.take(L0 * Np), *Cc = scratch.take(L0 * Np), *T1 = scratch.take(L0 * Np);
    float *CT = scratch.take(L0 * Np), *dBT = scratch.take(L0 * Np), *dCT = scratch.take(L0 * Np);
    float *out = scratch.take(L0 * Np);
    float *CB = scratch.take(L0 * L0), *M = scratch.take(L0 * L0), *E = scratch.take(L0 * L0);
    float *dM = scratch.take(L0 * L0), *dCB = scratch.take(L0 * L0);
    float *U = scratch.take(L0 * Pp), *UT = scratch.take(L0 * Pp), *dY = scratch.take(L0 * Pp);
    float *dYT = scratch.take(L0 * Pp), *dU = scratch.take(L0 * Pp);
    float *whole = scratch.take(Np);
    double *dD = (double *)scratch.take(2 * nh * Pp), *dA = (double *)scratch.take(2 * nh);
    memset(dD, 0, sizeof(double) * nh * Pp);
    memset(dA, 0, sizeof(double) * nh);
    Decay d;
    for (int64_t h = u.h0; h < u.h1; h++) {
      float *dSh = dS + (h - u.h0) * SP;
      if (a.dfinal)
        load_state(P, N, Pp, Np, state_in(a.dfinal, h), dSh);
      else
        memset(dSh, 0, sizeof(float) * SP);
    }
    for (int64_t block = keeps - 1; block >= 0; block--) {
      int64_t first = block * K, stop = std::min(first + K, chunks);
      recompute(block, first, stop, states, U, Bc, whole, d);
      for (int64_t c = stop - 1; c >= first; c--) {
        int k = tokens(c), L = pad16(k);
        int64_t t0 = c * a.chunk;
        pack(k, N, B + t0 * a.B_l, a.B_l, L, Np, Bc);
        pack(k, N, C + t0 * a.C_l, a.C_l, L, Np, Cc);
        transpose(L, Np, Bc, Np, T1, L);
        transpose(L, Np, Cc, Np, CT, L);
        for (int i = 0; i < L; i += BLOCK)
          gemm<false, SET>(BLOCK, i + BLOCK, Np, Cc + i * Np, Np, T1, L, CB + i * L, L);
        memset(dCB, 0, sizeof(float) * L * L);
        memset(dBT, 0, sizeof(float) * L * Np);
        memset(dCT, 0, sizeof(float) * L * Np);
        for (int64_t h = u.h0; h < u.h1; h++) {
          const float *S = states + ((c - first) * nh + h - u.h0) * SP;
          float *dSh = dS + (h - u.h0) * SP;
          alignas(64) float through[MAX_L], V[MAX_L], da[MAX_L], ddt[MAX_L];
          decay(c, h, k, L, d);
          decay_product<true>(L, d, CB, E, M);
          pack_u(t0, h, k, L, d, U);
          pack(k, P, (const T *)a.dy + u.b * a.dy_b + t0 * a.dy_l + h * a.dy_h, a.dy_l, L, Pp,
               dY);
          transpose(L, Pp, U, Pp, UT, L);
          transpose(L, Pp, dY, Pp, dYT, L);
          // within the chunk
          for (int i = 0; i < L; i += BLOCK)
            gemm<false, SET>(BLOCK, i + BLOCK, Pp, dY + i * Pp, Pp, UT, L, dM + i * L, L);
          pairs(L, dM, E, CB, dCB, da);
          gemm<false, SET>(L, Pp, Np, Bc, Np, dSh, Pp, dU, Pp);
          row_dots(L, dU, U, V);
          for (int s = 0; s < L; s += BLOCK)
            gemm<true, SCALED>(BLOCK, Pp, L - s, M + s * L + s, L, dY + s * Pp, Pp, dU + s * Pp,
                               Pp, d.leave + s);
          write_dx(t0, h, k, d, dU, dY, ddt, dD + (h - u.h0) * Pp);
          // through the states before and after
          scale_cols(Pp, L, d.leave, UT);
          gemm<false, ADD>(Np, L, Pp, dSh, Pp, UT, L, dBT, L);
          scale_cols(Pp, L, d.enter, dYT);
          gemm<false, SET>(Np, L, Pp, S, Pp, dYT, L, T1, L);
          add_and_dot(L, T1, CT, dCT, through);
          double passed = d.whole * dot(SP, dSh, S);
          std::fill(whole, whole + Np, d.whole);
          scale_rows(L, Pp, d.enter, dY);
          gemm<true, SCALED>(Np, Pp, L, Cc, Np, dY, Pp, dSh, Pp, whole);
          // a_t decays everything before t on its way to t and later
          double before = 0, after = passed, A = a.A[h];
          for (int t = 0; t < L; t++) {
            double own = before;
            before += (double)d.leave[t] * V[t];
            V[t] = (float)own;
          }
          float *ddt_out = a.ddt + (u.b * a.length + t0) * a.heads + h;
          for (int t = L - 1; t >= 0; t--) {
            after += through[t];
            double total = after + V[t] + da[t];
            if (t < k) {
              ddt_out[t * a.heads] = (float)(ddt[t] + A * total);
              dA[h - u.h0] += total * d.dt[t];
            }
          }
        }
        // dC = dCT^T + dCB B and dB = dBT^T + dCB^T C
        transpose(Np, L, dCT, L, out, Np);
        for (int i = 0; i < L; i += BLOCK)
          gemm<false, ADD>(BLOCK, Np, i + BLOCK, dCB + i * L, L, Bc, Np, out + i * Np, Np);
        write_bc(t0, k, out, a.dC);
        transpose(Np, L, dBT, L, out, Np);
        for (int s = 0; s < L; s += BLOCK)
          gemm<true, ADD>(BLOCK, Np, L - s, dCB + s * L + s, L, Cc + s * Np, Np, out + s * Np,
                          Np);
        write_bc(t0, k, out, a.dB);
      }
    }
    for (int64_t h = u.h0; h < u.h1; h++) {
      int64_t bh = u.b * a.heads + h;
      a.dA[bh] = dA[h - u.h0];
      if (a.dD) memcpy(a.dD + bh * P, dD + (h - u.h0) * Pp, sizeof(double) * P);
      if (a.dinitial) store_state(P, N, Pp, dS + (h - u.h0) * SP, a.dinitial + bh * P * N);
    }
  }

  // The states before chunks first .. stop-1, from the kept one.
  void recompute(int64_t block, int64_t first, int64_t stop, float *states, float *U, float *Bc,
                 float *whole, Decay &d) const {
    int64_t nh = u.h1 - u.h0;
    size_t SP = (size_t)Np * Pp;
    for (int64_t h = u.h0; h < u.h1; h++)
      memcpy(states + (h - u.h0) * SP, kept(h, block), sizeof(float) * SP);
    for (int64_t c = first; c + 1 < stop; c++) {
      int L = (int)a.chunk;  // only the last chunk of all can be short
      int64_t t0 = c * a.chunk;
      pack(L, N, B + t0 * a.B_l, a.B_l, L, Np, Bc);
      for (int64_t h = u.h0; h < u.h1; h++) {
        const float *S = states + ((c - first) * nh + h - u.h0) * SP;
        float *next = states + ((c + 1 - first) * nh + h - u.h0) * SP;
        decay(c, h, L, L, d);
        for (int t = 0; t < L; t++) d.dt[t] *= d.leave[t];
        pack_u(t0, h, L, L, d, U);
        std::fill(whole, whole + Np, d.whole);
        memcpy(next, S, sizeof(float) * SP);
        gemm<true, SCALED>(Np, Pp, L, Bc, Np, U, Pp, next, Pp, whole);
      }
    }
  }

  // dCB += dM * E; da_t = sum over s < t <= r of (dM * E * CB)_rs.
  static void pairs(int L, const float *dM, const float *E, const float *CB, float *dCB,
                    float *da) {
    alignas(64) float col[MAX_L] = {};
    for (int t = L - 1; t >= 0; t--) {
      int edge = t / BLOCK * BLOCK;
      vf total = {};
      const float *m = dM + t * L, *e = E + t * L, *cb = CB + t * L;
      float *dcb = dCB + t * L;
      for (int s = 0; s < edge; s += VW) {
        vf me = load(m + s) * load(e + s);
        store(dcb + s, load(dcb + s) + me);
        vf c = load(col + s) + me * load(cb + s);
        store(col + s, c);
        total += c;
      }
      for (int s = edge; s < edge + BLOCK; s += VW) {
        vf me = load(m + s) * load(e + s);
        store(dcb + s, load(dcb + s) + me);
        vi earlier = lanes(s) < t;
        vf w = select(earlier, me * load(cb + s), vf{});
        vf c = load(col + s) + w;
        store(col + s, c);
        total += select(earlier, c, vf{});
      }
      da[t] = sum(total);
    }
  }

  void row_dots(int L, const float *X, const float *Y, float *out) const {
    for (int t = 0; t < L; t++) {
      vf v = {};
      for (int j = 0; j < Pp; j += VW) v += load(X + t * Pp + j) * load(Y + t * Pp + j);
      out[t] = sum(v);
    }
  }

  static double dot(size_t n, const float *X, const float *Y) {
    double total = 0;
    for (size_t i = 0; i < n; i += 256) {
      vf v = {};
      for (size_t j = i; j < std::min(n, i + 256); j += VW) v += load(X + j) * load(Y + j);
      total += sum(v);
    }
    return total;
  }

  // sum += T; out_t = sum_n (T * CT)_nt; all (Np x L).
  void add_and_dot(int L, const float *T1, const float *CT, float *total, float *out) const {
    for (int t = 0; t < L; t += VW) {
      vf v = {};
      for (int n = 0; n < Np; n++) {
        vf a = load(T1 + n * L + t);
        store(total + n * L + t, load(total + n * L + t) + a);
        v += a * load(CT + n * L + t);
      }
      store(out + t, v);
    }
  }

  void write_dx(int64_t t0, int64_t h, int k, const Decay &d, const float *dU, const float *dY,
                float *ddt, double *dD) const {
    const float *D = a.D ? a.D + h * P : nullptr;
    alignas(64) float dD_chunk[1024] = {};
    for (int t = 0; t < k; t++) {
      const T *xt = x + (t0 + t) * a.x_l + h * a.x_h;
      T *out = (T *)a.dx + u.b * a.dx_b + (t0 + t) * a.dx_l + h * a.dx_h;
      const float *du = dU + t * Pp, *dy = dY + t * Pp;
      vf v = {};
      float rest = 0;
      int j = 0;
      for (; j + VW <= P; j += VW) {
        vf g = load(du + j), xv = load(xt + j);
        v += g * xv;
        g *= d.dt[t];
        if (D) {
          g += load(D + j) * load(dy + j);
          store(dD_chunk + j, load(dD_chunk + j) + load(dy + j) * xv);
        }
        store(out + j, g);
      }
      for (; j < P; j++) {
        float xv = to_float(xt[j]), g = du[j];
        rest += g * xv;
        g *= d.dt[t];
        if (D) g += D[j] * dy[j], dD_chunk[j] += dy[j] * xv;
        from_float(out + j, g);
      }
      ddt[t] = sum(v) + rest;
    }
    if (D)
      for (int j = 0; j < P; j++) dD[j] += dD_chunk[j];
  }

  void write_bc(int64_t t0, int k, const float *src, float *base) const {
    float *dst = base + ((((u.split * a.batch + u.b) * a.length + t0) * a.groups) + u.g) * N;
    for (int t = 0; t < k; t++) memcpy(dst + t * a.groups * N, src + t * Np, sizeof(float) * N);
  }
};

thread_local Scratch scratch;

template <typename T>
void run(const SsdArgs *a, bool backward) {
  int64_t units = a->batch * a->groups * a->splits;
  int threads = (int)std::min<int64_t>(a->threads, units);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; i++) {
    Scan<T> scan(*a, i);
    if (backward)
      scan.backward(scratch);
    else
      scan.forward(scratch);
  }
}

}  // namespace

extern "C" {
int64_t ssd_args_size() { return sizeof(SsdArgs); }
void ssd_forward(const SsdArgs *a) { a->bf16 ? run<uint16_t>(a, false) : run<float>(a, false); }
void ssd_backward(const SsdArgs *a) { a->bf16 ? run<uint16_t>(a, true) : run<float>(a, true); }
}
