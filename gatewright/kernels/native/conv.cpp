// Causal depthwise convolution with an optional SiLU over (b, l, d), channels contiguous.
//
// One unit of work is a batch row and a block of channels.  It goes through tiles of tokens,
// and in a tile through one vector of channels after the other: taps, recent inputs and sums
// of gradients then stay in registers, and each input is read once.  The backward pass
// recomputes the pre-activation from x instead of keeping it.
//
// There are at least VW channels; the last vector of a block may overlap the one before, which
// then computes the same values twice.

#include <algorithm>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct ConvArgs {
  int64_t batch, length, channels, width, silu, threads, bf16;
  const void *x;
  int64_t x_b, x_l;
  const float *weight;     // (w, d)
  const float *bias;       // (d) or null
  const float *initial;    // (b, w-1, d) or null: the inputs before the first
  const int32_t *segment;  // (b, l), runs numbered from 0, or null
  void *y;
  int64_t y_b, y_l;
  const void *dy;
  int64_t dy_b, dy_l;
  void *dx;
  int64_t dx_b, dx_l;
  double *dweight;  // (b, w, d)
  double *dbias;    // (b, d) or null
};
}

namespace {

constexpr int CHANNELS = 256;  // per unit
constexpr int TILE = 64;       // tokens
constexpr int VECTORS = CHANNELS / VW;

template <int W, typename T>
struct Conv {
  const ConvArgs &a;
  int64_t b;
  int c0, n, vectors;  // channels c0 .. c0 + n
  const T *x;
  const int32_t *seg;
  // mask[k][i]: 1 if token i of the tile and the one k before are of one segment
  float mask[W][TILE];

  Conv(const ConvArgs &args, int64_t unit) : a(args) {
    int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS;
    b = unit / blocks;
    c0 = (int)(unit % blocks) * CHANNELS;
    n = (int)std::min<int64_t>(CHANNELS, a.channels - c0);
    if (n < VW) c0 -= VW - n, n = VW;
    vectors = (n + VW - 1) / VW;
    x = (const T *)a.x + b * a.x_b + c0;
    seg = a.segment ? a.segment + b * a.length : nullptr;
  }

  int column(int v) const { return std::min(v * VW, n - VW); }

  vf tap(int k, int j) const { return load(a.weight + (W - 1 - k) * a.channels + c0 + j); }
  vf bias(int j) const { return a.bias ? load(a.bias + c0 + j) : vf{}; }

  // The input before the sequence's first, back in 1 .. W-1.
  vf before(int back, int j) const {
    if (!a.initial) return vf{};
    return load(a.initial + (b * (W - 1) + W - 1 - back) * a.channels + c0 + j);
  }
  vf input(int64_t t, int j) const {
    return t >= 0 ? load(x + t * a.x_l + j) : before((int)-t, j);
  }

  void fill_masks(int64_t t0, int count) {
    for (int k = 1; k < W; k++)
      for (int i = 0; i < count; i++) {
        int64_t t = t0 + i, s = t - k;
        mask[k][i] = seg && (s < 0 ? seg[t] != 0 : seg[s] != seg[t]) ? 0.0f : 1.0f;
      }
  }

  template <bool SEG, bool SILU>
  void forward_tile(int64_t t0, int count) const {
    for (int v = 0; v < vectors; v++) {
      int j = column(v);
      vf w[W], past[W];
      for (int k = 0; k < W; k++) w[k] = tap(k, j);
      for (int k = 1; k < W; k++) past[k] = input(t0 - k, j);
      vf bias_j = bias(j);
      const T *in = x + t0 * a.x_l + j;
      T *out = (T *)a.y + b * a.y_b + t0 * a.y_l + c0 + j;
      int64_t x_l = a.x_l, y_l = a.y_l;
      for (int i = 0; i < count; i++, in += x_l, out += y_l) {
        __builtin_prefetch(in + 2 * VW);
        past[0] = load(in);
        vf s = bias_j + w[0] * past[0];
#pragma GCC unroll 4
        for (int k = 1; k < W; k++) s += w[k] * (SEG ? past[k] * mask[k][i] : past[k]);
        store(out, SILU ? s * vsigmoid(s) : s);
#pragma GCC unroll 4
        for (int k = W - 1; k > 0; k--) past[k] = past[k - 1];
      }
    }
  }

  void forward() {
    for (int64_t t0 = 0; t0 < a.length; t0 += TILE) {
      int count = (int)std::min<int64_t>(TILE, a.length - t0);
      if (seg) {
        fill_masks(t0, count);
        a.silu ? forward_tile<true, true>(t0, count) : forward_tile<true, false>(t0, count);
      } else {
        a.silu ? forward_tile<false, true>(t0, count) : forward_tile<false, false>(t0, count);
      }
    }
  }

  // What one vector of channels carries from tile to tile.
  struct Carry {
    vf terms[W];  // terms[k]: sum so far of dx of the k-th last token
    vf dw[W], db;
    double dw_total[W][VW], db_total[VW];
  };

  template <bool SEG, bool SILU>
  void backward_tile(int64_t t0, int count, Carry *carry) const {
    for (int v = 0; v < vectors; v++) {
      int j = column(v);
      vf w[W], past[W], open[W], dw[W] = {}, db = {};
      for (int k = 0; k < W; k++) w[k] = tap(k, j), open[k] = carry[v].terms[k];
      for (int k = 1; k < W; k++) past[k] = input(t0 - k, j);
      vf bias_j = bias(j);
      const T *in = x + t0 * a.x_l + j;
      const T *grad = (const T *)a.dy + b * a.dy_b + t0 * a.dy_l + c0 + j;
      T *out = (T *)a.dx + b * a.dx_b + (t0 - (W - 1)) * a.dx_l + c0 + j;
      int64_t x_l = a.x_l, dy_l = a.dy_l, dx_l = a.dx_l;
      for (int i = 0; i < count; i++, in += x_l, grad += dy_l, out += dx_l) {
        __builtin_prefetch(in + 2 * VW);
        __builtin_prefetch(grad + 2 * VW);
        past[0] = load(in);
        vf seen[W];
        vf s = bias_j;
#pragma GCC unroll 4
        for (int k = 0; k < W; k++) {
          seen[k] = SEG && k ? past[k] * mask[k][i] : past[k];
          s += w[k] * seen[k];
        }
        vf g = load(grad);
        if (SILU) {
          vf q = vsigmoid(s);
          g *= q * (1.0f + s * (1.0f - q));
        }
        db += g;
        // open[k] belongs to the token k before; this one is its last term when k = W - 1
#pragma GCC unroll 4
        for (int k = 0; k < W; k++) {
          dw[k] += g * seen[k];
          vf term = w[k] * (SEG && k ? g * mask[k][i] : g);
          open[k] = k ? open[k] + term : term;
        }
        if (t0 + i >= W - 1) store(out, open[W - 1]);
#pragma GCC unroll 4
        for (int k = W - 1; k > 0; k--) past[k] = past[k - 1], open[k] = open[k - 1];
      }
      for (int k = 0; k < W; k++) {
        carry[v].terms[k] = open[k];
        for (int i = 0; i < VW; i++) carry[v].dw_total[k][i] += dw[k][i];
      }
      for (int i = 0; i < VW; i++) carry[v].db_total[i] += db[i];
    }
  }

  void backward() {
    alignas(64) static thread_local Carry carry[VECTORS];
    memset((void *)carry, 0, sizeof carry);
    for (int64_t t0 = 0; t0 < a.length; t0 += TILE) {
      int count = (int)std::min<int64_t>(TILE, a.length - t0);
      if (seg) {
        fill_masks(t0, count);
        a.silu ? backward_tile<true, true>(t0, count, carry)
               : backward_tile<true, false>(t0, count, carry);
      } else {
        a.silu ? backward_tile<false, true>(t0, count, carry)
               : backward_tile<false, false>(t0, count, carry);
      }
    }
    for (int v = 0; v < vectors; v++) {
      int j = column(v);
      // after the last shift, terms[k] belongs to the k-th last token (k = 1 is the last)
      for (int k = 1; k < W; k++)
        if (a.length - k >= 0)
          store((T *)a.dx + b * a.dx_b + (a.length - k) * a.dx_l + c0 + j, carry[v].terms[k]);
      for (int k = 0; k < W; k++)
        memcpy(a.dweight + (b * W + W - 1 - k) * a.channels + c0 + j, carry[v].dw_total[k],
               sizeof carry[v].dw_total[k]);
      if (a.dbias)
        memcpy(a.dbias + b * a.channels + c0 + j, carry[v].db_total, sizeof carry[v].db_total);
    }
  }
};

template <int W, typename T>
void run(const ConvArgs &a, bool backward) {
  int64_t units = a.batch * ((a.channels + CHANNELS - 1) / CHANNELS);
  int threads = (int)std::min<int64_t>(a.threads, units);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; i++) {
    Conv<W, T> conv(a, i);
    if (backward)
      conv.backward();
    else
      conv.forward();
  }
}

template <int W>
void run(const ConvArgs &a, bool backward) {
  a.bf16 ? run<W, uint16_t>(a, backward) : run<W, float>(a, backward);
}

void dispatch(const ConvArgs &a, bool backward) {
  if (a.width == 2) run<2>(a, backward);
  if (a.width == 3) run<3>(a, backward);
  if (a.width == 4) run<4>(a, backward);
}

}  // namespace

extern "C" {
int64_t conv_args_size() { return sizeof(ConvArgs); }
void conv_forward(const ConvArgs *a) { dispatch(*a, false); }
void conv_backward(const ConvArgs *a) { dispatch(*a, true); }
}
