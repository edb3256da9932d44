// What a small recurrent cell does between its projections, for one sequence in the caches:
// short convolution, SiLU, key norms, gates, the rank-one recurrence, and all of it backwards.
//
// `proj` holds a token's projections in a row: k, v and the gates' pre-activations in any order,
// then q, which only asked tokens need.  See recall_cell.py.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "rank_one.h"

extern "C" {
struct RecallCellArgs {
  int64_t members, sequences, tokens, width;
  int64_t used, reverse;  // used: tokens up to the last asked one, from the last if reverse
  int64_t columns, key_width, value_width, heads, kind, reads;
  int64_t q_at, k_at, v_at, beta_at, gate_at, gate_width, rate_at;  // columns of proj
  int64_t mixed, q_tap, k_tap, v_tap;  // the convolved columns, and where a group's taps are
  int64_t block, threads;
  const float *u;            // (members, sequences, tokens, width)
  const float *weight;       // (members, columns, width)
  const float *bias;         // (members, columns)
  const float *taps;         // (members, 4, mixed) or null: not armed
  const float *tap_bias;     // (members, mixed)
  const float *removal;      // (members, key_width): RWKV
  const float *head_rate;    // (members, heads): MAMBA, e^A_log
  const float *skip;         // (members, heads): MAMBA
  const int64_t *positions;  // (members, sequences, reads) or null: every token is read
  float *out;                // (members, sequences, reads or tokens, value_width)
  float *removed, *checkpoints;  // of the used tokens, in the order of the recurrence
  const float *dout;
  float *du;
  float *dweight;  // (members, blocks, width, columns), both padded to 16
  float *dsmall;   // (members, blocks, columns + 5 mixed + key_width + 2 heads)
};
}

namespace recall_cell {
using namespace rank_one;

enum Kind { DELTANET, GATED, RWKV, RWKV_DIAGONAL, MAMBA };
constexpr int TAPS = 4;
constexpr float MIN_DECAY = 0.006737947f;  // e^-5
constexpr float RWKV_RATE = 0.60653066f;   // e^-0.5

// log(1 + e^x)
INLINE vf vsoftplus(vf x) {
  vf y = vexp(select((vi)(x < 0), x, -x));  // in (0, 1]
  vf s = y / (2.0f + y), z = s * s;         // log(1 + y) = 2 atanh(s), s at most 1/3
  vf p = splat(2.0f / 15);
  for (int n = 13; n > 0; n -= 2) p = p * z + 2.0f / n;
  return p * s + select((vi)(x < 0), vf{}, x);
}

template <typename F>
INLINE void each(size_t n, F f) {
  for (size_t i = 0; i < n; i += VW) f(i);
}

INLINE float dot(const float *a, const float *b, int n) {
  vf total = {};
  for (int i = 0; i < n; i += VW) total += load(a + i) * load(b + i);
  return sum(total);
}

// Some columns of the projections and what becomes of them.
struct Group {
  int at, tap, width, padded;  // first column, first of its taps
  float *x;             // (TAPS - 1 + length, padded): the columns after TAPS - 1 zero rows
  float *y, *slope;     // (length, padded): SiLU of the convolution, its slope
  float *dy, *dx;       // gradients, dx as x
  float *taps, *dtaps;  // (TAPS + 1, padded): taps and bias, or unused
};

class Cell {
 public:
  const RecallCellArgs &a;
  const int L, K, V, H, kp, vp, hp, lp, chunks, row_size;  // row_size: of proj, padded
  const Rank rank;
  const Decay decay;
  Scratch pool;
  Group q, k, v;
  Sequence s;
  uint8_t *read, *needed;
  float *q_inverse, *k_inverse, *b_inverse, *q_hat, *k_hat, *beta, *gate, *rate, *w, *ra, *rb;
  float *values, *removal, *dremoval, *dhead;
  const float *proj;
  int64_t member;

  static int up(int n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

  explicit Cell(const RecallCellArgs &args)
      : a(args),
        L((int)a.used),
        K((int)a.key_width),
        V((int)a.value_width),
        H((int)a.heads),
        kp(padded_width(K)),
        vp(up(V)),
        hp(up(std::max(H, 1))),
        lp(up(L)),
        chunks((L + CHUNK - 1) / CHUNK),
        row_size(up((int)a.columns)),
        rank(a.kind <= GATED ? DELTA : a.kind == RWKV ? GENERAL : DIAGONAL),
        decay(a.kind == DELTANET ? NONE : a.kind == MAMBA ? HEAD : VECTOR) {
    size_t wide = std::max(kp, vp);
    pool.begin((size_t)(lp + TAPS) * (30 * wide + 8 * hp + 40) + 64 * wide +
               (CHUNK + 1) * 8 * kp + 4096);
    auto group = [&](Group &g, int64_t at, int64_t tap, int width, int padded) {
      g.at = (int)at, g.tap = (int)tap, g.width = width, g.padded = padded;
      g.x = zeros((size_t)(L + TAPS - 1) * padded), g.dx = zeros((size_t)(L + TAPS - 1) * padded);
      g.slope = zeros((size_t)L * padded), g.y = zeros((size_t)L * padded);
      g.dy = zeros((size_t)L * padded);
      g.taps = zeros((TAPS + 1) * padded), g.dtaps = zeros((TAPS + 1) * padded);
    };
    group(q, a.q_at, a.q_tap, K, kp);
    group(k, a.k_at, a.k_tap, K, kp);
    group(v, a.v_at, a.v_tap, V, vp);
    read = (uint8_t *)zeros(lp / 4), needed = (uint8_t *)zeros(lp / 4);
    q_inverse = zeros(lp), k_inverse = zeros(lp), b_inverse = zeros(lp), beta = zeros(lp);
    q_hat = zeros((size_t)L * kp), k_hat = zeros((size_t)L * kp);
    gate = zeros((size_t)L * std::max(kp, hp)), rate = zeros((size_t)L * std::max(kp, hp));
    w = zeros((size_t)L * std::max(kp, hp));
    ra = zeros((size_t)L * kp), rb = zeros((size_t)L * kp);
    values = zeros((size_t)L * vp);
    removal = zeros(kp), dremoval = zeros(kp), dhead = zeros(2 * hp);
    s = {};
    s.length = L, s.kp = kp, s.vp = vp, s.heads = hp, s.head_rows = H ? V / H : V;
    s.w = w, s.a = ra, s.b = rb, s.beta = beta, s.read = a.positions ? read : nullptr;
    s.q = a.kind == MAMBA ? q.y : q_hat, s.k = a.kind == MAMBA ? k.y : k_hat;
    s.v = a.kind == MAMBA ? values : v.y;
    s.o = zeros((size_t)L * vp);
    s.dq = q.dy, s.dk = k.dy, s.dv = v.dy;
    s.da = zeros((size_t)L * kp), s.db = zeros((size_t)L * kp);
    s.dw = zeros((size_t)L * std::max(kp, hp));
    s.states = pool.take((size_t)(CHUNK + 1) * 8 * kp);
  }

  float *zeros(size_t n) {
    float *p = pool.take(n);
    memset(p, 0, n * sizeof(float));
    return p;
  }
  static void clear(float *p, size_t n) { memset(p, 0, n * sizeof(float)); }

  // --- what a member's sequences share ---

  void begin_member(int64_t m) {
    member = m;
    for (Group *g : {&q, &k, &v}) {
      clear(g->dtaps, (size_t)(TAPS + 1) * g->padded);
      if (!a.taps) continue;
      for (int i = 0; i < TAPS; i++)
        memcpy(g->taps + i * g->padded, a.taps + (m * TAPS + i) * a.mixed + g->tap, 4 * g->width);
      memcpy(g->taps + TAPS * g->padded, a.tap_bias + m * a.mixed + g->tap, 4 * g->width);
    }
    if (a.removal) memcpy(removal, a.removal + m * K, 4 * K);
    clear(dremoval, kp);
    clear(dhead, 2 * hp);
  }

  void end_member(float *to) const {  // taps (4, mixed), bias (mixed), removal, head rate, skip
    for (const Group *g : {&q, &k, &v})
      for (int i = 0; i <= TAPS; i++)
        memcpy(to + i * a.mixed + g->tap, g->dtaps + i * g->padded, 4 * g->width);
    to += (TAPS + 1) * a.mixed;
    memcpy(to, dremoval, 4 * K);
    memcpy(to + K, dhead, 4 * H);
    memcpy(to + K + H, dhead + hp, 4 * H);
  }

  // --- forward ---

  bool is_read(int t) const { return !a.positions || read[t]; }

  void convolve(Group &g, bool all, bool slopes) {
    const int p = g.padded;
    for (int t = 0; t < L; t++) memcpy(g.x + (t + TAPS - 1) * p, proj + t * row_size + g.at, 4 * g.width);
    for (int t = 0; t < L; t++) {
      if (!all && !is_read(t)) continue;
      for (int j = 0; j < p; j += VW) {
        const float *x = g.x + t * p + j;
        vf u = load(x + (TAPS - 1) * p);
        if (a.taps) {
          const float *c = g.taps + j;
          u = load(c + TAPS * p) + u * load(c + (TAPS - 1) * p);
          for (int i = 0; i < TAPS - 1; i++) u += load(x + i * p) * load(c + i * p);
        }
        vf open = vsigmoid(u);
        store(g.y + t * p + j, u * open);
        if (slopes) store(g.slope + t * p + j, open * (1.0f + u * (1.0f - open)));
      }
    }
  }

  // hat = y / |y| by row; keeps 1 / |y|.
  void normalise(const float *y, float *hat, float *inverse, bool all) const {
    for (int t = 0; t < L; t++) {
      if (!all && !is_read(t)) continue;
      const float *x = y + t * kp;
      inverse[t] = 1.0f / std::max(std::sqrt(dot(x, x, kp)), 1e-12f);
      for (int j = 0; j < kp; j += VW) store(hat + t * kp + j, load(x + j) * inverse[t]);
    }
  }

  // Columns from `at` on, in rows of `padded`; one column is spread over the row.
  void columns(int64_t at, int width, int padded, float *to) const {
    for (int t = 0; t < L; t++) {
      const float *from = proj + t * row_size + at;
      if (width == 1)
        std::fill(to + t * padded, to + (t + 1) * padded, from[0]);
      else
        memcpy(to + t * padded, from, 4 * width);
    }
  }

  void gates() {
    if (rank == DELTA) {
      for (int t = 0; t < L; t++) beta[t] = proj[t * row_size + a.beta_at];
      each(lp, [&](size_t i) { store(beta + i, vsigmoid(load(beta + i))); });
    }
    if (a.kind == MAMBA) return heads();
    if (decay == NONE) return;
    columns(a.gate_at, (int)a.gate_width, kp, gate);
    each((size_t)L * kp, [&](size_t i) {
      vf g = vsigmoid(load(gate + i));
      store(gate + i, g);
      vf low = splat(MIN_DECAY);
      store(w + i, a.kind == GATED ? select((vi)(g > low), g, low) : vexp_inside(g * -RWKV_RATE));
    });
    if (a.kind != RWKV) return;
    columns(a.rate_at, K, kp, rate);
    for (int t = 0; t < L; t++)
      for (int j = 0; j < kp; j += VW)
        store(ra + t * kp + j, load(k_hat + t * kp + j) * load(removal + j));
    normalise(ra, rb, b_inverse, true);
    each((size_t)L * kp, [&](size_t i) {
      vf r = vsigmoid(load(rate + i));
      store(rate + i, r);
      store(ra + i, r * load(rb + i));
    });
  }

  // gate keeps the slope of dt, rate dt itself; values = dt x.
  void heads() {
    columns(a.gate_at, H, hp, gate);
    const float *fast = a.head_rate + member * H;
    const int rows = s.head_rows;
    for (int t = 0; t < L; t++) {
      float *raw = gate + t * hp, *dt = rate + t * hp, *log_w = w + t * hp;
      for (int j = 0; j < hp; j += VW) {
        store(dt + j, vsoftplus(load(raw + j)));
        store(raw + j, vsigmoid(load(raw + j)));
      }
      for (int h = 0; h < H; h++) {
        log_w[h] = std::max(-dt[h] * fast[h], -5.0f);
        const float *x = v.y + t * vp + h * rows;
        float *to = values + t * vp + h * rows;
        for (int i = 0; i < rows; i++) to[i] = dt[h] * x[i];
      }
      std::fill(log_w + H, log_w + hp, 0.0f);  // of rows that only pad: whatever stood there would grow
      for (int j = 0; j < hp; j += VW) store(log_w + j, vexp_inside(load(log_w + j)));
    }
  }

  // A token's place in the recurrence from that in the sequence, and back.
  int64_t order(int64_t t) const { return a.reverse ? a.tokens - 1 - t : t; }
  int64_t rows_out() const { return a.positions ? a.reads : a.tokens; }
  // The i-th output's place in the recurrence.
  int64_t token(int64_t row, int64_t i) const {
    return order(a.positions ? a.positions[row * a.reads + i] : i);
  }

  // Which tokens of a sequence are read, and which therefore need their q columns.
  // Returns how many do.
  int mark(int64_t row) {
    if (!a.positions) return L;
    memset(read, 0, L), memset(needed, 0, L);
    for (int64_t i = 0; i < a.reads; i++) {
      int t = (int)token(row, i);
      read[t] = 1;
      for (int c = 0; c < (a.taps ? TAPS : 1) && c <= t; c++) needed[t - c] = 1;
    }
    return (int)std::count(needed, needed + L, 1);
  }
  bool needs_q(int t) const { return !a.positions || needed[t]; }

  void begin(int64_t row, const float *projections, bool checkpoints, bool training) {
    proj = projections;
    s.removed = a.removed ? a.removed + row * L * vp : nullptr;
    s.checkpoints = checkpoints ? a.checkpoints + row * chunks * vp * kp : nullptr;
    convolve(q, false, training);
    convolve(k, true, training);
    convolve(v, true, training);
    if (a.kind != MAMBA) {
      normalise(q.y, q_hat, q_inverse, false);
      normalise(k.y, k_hat, k_inverse, true);
    }
    gates();
  }

  void forward(int64_t row, const float *projections) {
    begin(row, projections, a.checkpoints != nullptr, false);
    run(s, rank, decay, false);
    const float *skip = a.kind == MAMBA ? a.skip + member * H : nullptr;
    for (int64_t i = 0; i < rows_out(); i++) {
      float *to = a.out + (row * rows_out() + i) * V;
      const float *o = s.o + token(row, i) * vp, *x = v.y + token(row, i) * vp;
      for (int c = 0; c < V; c++) to[c] = o[c] + (skip ? skip[c / s.head_rows] * x[c] : 0.0f);
    }
  }

  // --- backward ---

  void backward(int64_t row, const float *projections, float *to) {
    begin(row, projections, true, true);
    float *dout = s.o;  // the outputs are not needed again
    clear(dout, (size_t)L * vp);
    for (int64_t i = 0; i < rows_out(); i++) {
      const float *from = a.dout + (row * rows_out() + i) * V;
      float *to = dout + token(row, i) * vp;  // += : a token may be asked for twice
      for (int c = 0; c < V; c++) to[c] += from[c];
    }
    s.dout = dout;
    clear(q.dy, (size_t)L * kp), clear(k.dy, (size_t)L * kp);
    if (decay != NONE) clear(s.dw, (size_t)L * (decay == HEAD ? hp : kp));
    if (rank == GENERAL) clear(s.da, (size_t)L * kp), clear(s.db, (size_t)L * kp);
    run(s, rank, decay, true);
    back_gates(to);
    if (a.kind != MAMBA) {
      back_norm(q.dy, q_hat, q_inverse, false);
      back_norm(k.dy, k_hat, k_inverse, true);
    }
    back_convolve(q, to, false);
    back_convolve(k, to, true);
    back_convolve(v, to, true);
  }

  // From the gradient of hat to that of y, in place.
  void back_norm(float *g, const float *hat, const float *inverse, bool all) const {
    for (int t = 0; t < L; t++) {
      if (!all && !is_read(t)) continue;
      const float *x = hat + t * kp;
      float *d = g + t * kp;
      float along = dot(d, x, kp);
      for (int j = 0; j < kp; j += VW)
        store(d + j, (load(d + j) - along * load(x + j)) * inverse[t]);
    }
  }

  void back_gates(float *to) {
    if (rank == DELTA)
      for (int t = 0; t < L; t++) {
        float *d = v.dy + t * vp;
        to[t * row_size + a.beta_at] = dot(d, s.removed + t * vp, vp) * beta[t] * (1 - beta[t]);
        for (int j = 0; j < vp; j += VW) store(d + j, load(d + j) * beta[t]);
      }
    if (a.kind == MAMBA) return back_heads(to);
    if (a.kind == RWKV) back_removal(to);
    if (decay == NONE) return;
    each((size_t)L * kp, [&](size_t i) {
      vf g = load(gate + i), d = load(s.dw + i) * g * (1.0f - g);
      if (a.kind == GATED)
        d = select((vi)(g > splat(MIN_DECAY)), d, vf{});
      else
        d *= load(w + i) * -RWKV_RATE;
      store(s.dw + i, d);
    });
    spread(s.dw, kp, to, a.gate_at, a.gate_width);
  }

  void spread(const float *from, int padded, float *to, int64_t at, int64_t width) const {
    for (int t = 0; t < L; t++) {
      const float *row = from + t * padded;
      if (width == 1)  // the padding's share is zero: its keys are
        to[t * row_size + at] = dot(row, ones(), padded);
      else
        memcpy(to + t * row_size + at, row, 4 * width);
    }
  }
  static const float *ones() {
    static const struct Ones {
      alignas(64) float v[MAX_VECTORS * VW];
      Ones() { std::fill(v, v + MAX_VECTORS * VW, 1.0f); }
    } all;
    return all.v;
  }

  void back_removal(float *to) {
    each((size_t)L * kp, [&](size_t i) {
      vf da = load(s.da + i), r = load(rate + i);
      store(s.db + i, load(s.db + i) + da * r);
      store(s.da + i, da * load(rb + i) * r * (1.0f - r));
    });
    spread(s.da, kp, to, a.rate_at, K);
    back_norm(s.db, rb, b_inverse, true);
    for (int t = 0; t < L; t++)
      for (int j = 0; j < kp; j += VW) {
        size_t i = (size_t)t * kp + j;
        vf d = load(s.db + i);
        store(dremoval + j, load(dremoval + j) + d * load(k_hat + i));
        store(k.dy + i, load(k.dy + i) + d * load(removal + j));
      }
  }

  void back_heads(float *to) {
    const float *fast = a.head_rate + member * H, *skip = a.skip + member * H;
    int rows = s.head_rows;
    for (int t = 0; t < L; t++) {
      const float *x = v.y + t * vp, *dout = s.dout + t * vp;
      float *d = v.dy + t * vp, *dskip = dhead + hp;
      for (int h = 0; h < H; h++) {
        float dt = rate[t * hp + h], ddt = 0;
        float dlog = -dt * fast[h] > -5.0f ? s.dw[t * hp + h] * w[t * hp + h] : 0.0f;
        for (int i = h * rows; i < (h + 1) * rows; i++) {
          ddt += d[i] * x[i];
          d[i] *= dt;
        }
        if (is_read(t))
          for (int i = h * rows; i < (h + 1) * rows; i++) {
            d[i] += skip[h] * dout[i];
            dskip[h] += dout[i] * x[i];
          }
        dhead[h] -= dlog * dt;
        to[t * row_size + a.gate_at + h] = (ddt - dlog * fast[h]) * gate[t * hp + h];
      }
    }
  }

  void back_convolve(Group &g, float *to, bool all) {
    const int p = g.padded;
    for (int j = 0; j < p; j += VW) {
      vf taps[TAPS], dtaps[TAPS + 1], open[TAPS] = {};  // open[c]: of the input c - 3 tokens on
      for (int c = 0; c < TAPS; c++)
        taps[c] = a.taps ? load(g.taps + c * p + j) : splat(c == TAPS - 1 ? 1.0f : 0.0f);
      for (int c = 0; c <= TAPS; c++) dtaps[c] = load(g.dtaps + c * p + j);
      for (int t = 0; t < L; t++) {
        size_t i = (size_t)t * p + j;
        if (all || is_read(t)) {
          vf d = load(g.dy + i) * load(g.slope + i);
#pragma GCC unroll 4
          for (int c = 0; c < TAPS; c++) {
            open[c] += d * taps[c];
            dtaps[c] += d * load(g.x + i + c * p);
          }
          dtaps[TAPS] += d;
        }
        store(g.dx + i, open[0]);
#pragma GCC unroll 3
        for (int c = 0; c < TAPS - 1; c++) open[c] = open[c + 1];
        open[TAPS - 1] = vf{};
      }
      for (int c = 0; c < TAPS - 1; c++) store(g.dx + (size_t)(L + c) * p + j, open[c]);
      for (int c = 0; c <= TAPS; c++) store(g.dtaps + c * p + j, dtaps[c]);
    }
    for (int t = 0; t < L; t++)
      memcpy(to + t * row_size + g.at, g.dx + (size_t)(t + TAPS - 1) * p, 4 * g.width);
  }
};

}  // namespace recall_cell
