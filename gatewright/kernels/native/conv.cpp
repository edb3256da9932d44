// Causal depthwise convolution with an optional SiLU over (b, l, d), channels contiguous.
//
// One unit of work is a batch row and a block of channels; it walks along the tokens.  The
// backward pass recomputes the pre-activation from x instead of keeping it.

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
constexpr int FLUSH = 256;     // tokens between moves of fp32 sums into double ones

// W - 1 rows of history before the first token, in fp32.
template <int W, typename T>
struct Conv {
  const ConvArgs &a;
  int64_t b;
  int c0, n;  // channels c0 .. c0 + n
  const T *x;
  const int32_t *seg;
  alignas(64) float past[W - 1][CHANNELS];

  Conv(const ConvArgs &args, int64_t unit) : a(args) {
    int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS;
    b = unit / blocks;
    c0 = (int)(unit % blocks) * CHANNELS;
    n = (int)std::min<int64_t>(CHANNELS, a.channels - c0);
    x = (const T *)a.x + b * a.x_b + c0;
    seg = a.segment ? a.segment + b * a.length : nullptr;
    memset(past, 0, sizeof past);
    if (a.initial)
      for (int k = 0; k < W - 1; k++)
        memcpy(past[k], a.initial + (b * (W - 1) + k) * a.channels + c0, n * sizeof(float));
  }

  // Taps 0 .. reach(t) look at inputs of t's own segment.
  int reach(int64_t t) const {
    if (!seg) return W - 1;
    int k = 0;
    while (k < W - 1) {
      int64_t s = t - k - 1;
      if (s < 0 ? seg[t] != 0 : seg[s] != seg[t]) break;
      k++;
    }
    return k;
  }

  // The input k tokens before t, channel j on (VW of them).
  __attribute__((always_inline)) inline vf input(int64_t t, int k, int j) const {
    int64_t s = t - k;
    return s >= 0 ? load(x + s * a.x_l + j) : load(past[s + W - 1] + j);
  }
  __attribute__((always_inline)) inline float input1(int64_t t, int k, int j) const {
    int64_t s = t - k;
    return s >= 0 ? to_float(x[s * a.x_l + j]) : past[s + W - 1][j];
  }
  const float *tap(int k) const { return a.weight + (W - 1 - k) * a.channels + c0; }

  __attribute__((always_inline)) inline vf pre(int64_t t, int limit, int j) const {
    vf v = a.bias ? load(a.bias + c0 + j) : vf{};
#pragma GCC unroll 8
    for (int k = 0; k < W; k++)
      if (k <= limit) v += load(tap(k) + j) * input(t, k, j);
    return v;
  }
  float pre1(int64_t t, int limit, int j) const {
    float v = a.bias ? a.bias[c0 + j] : 0;
    for (int k = 0; k <= limit; k++) v += tap(k)[j] * input1(t, k, j);
    return v;
  }

  void forward() const {
    for (int64_t t = 0; t < a.length; t++) {
      T *y = (T *)a.y + b * a.y_b + t * a.y_l + c0;
      int limit = reach(t), j = 0;
      if (limit == W - 1 && t >= W - 1) {
        for (; j + VW <= n; j += VW) {
          vf v = pre_inside(t, j);
          store(y + j, a.silu ? v * vsigmoid(v) : v);
        }
      } else {
        for (; j + VW <= n; j += VW) {
          vf v = pre(t, limit, j);
          store(y + j, a.silu ? v * vsigmoid(v) : v);
        }
      }
      for (; j < n; j++) {
        float v = pre1(t, limit, j);
        from_float(y + j, a.silu ? v * vsigmoid(splat(v))[0] : v);
      }
    }
  }

  // pre() where every tap is inside the sequence and the segment: no branches.
  __attribute__((always_inline)) inline vf pre_inside(int64_t t, int j) const {
    vf v = a.bias ? load(a.bias + c0 + j) : vf{};
#pragma GCC unroll 8
    for (int k = 0; k < W; k++) v += load(tap(k) + j) * load(x + (t - k) * a.x_l + j);
    return v;
  }

  void backward() const {
    // dpre of the last W tokens, and how far each of them reaches back
    alignas(64) float ring[W][CHANNELS] = {};
    alignas(64) float dw[W][CHANNELS] = {}, db[CHANNELS] = {};
    int limits[W] = {};
    double *dweight = a.dweight + b * W * a.channels + c0;
    double *dbias = a.dbias ? a.dbias + b * a.channels + c0 : nullptr;
    for (int k = 0; k < W; k++) std::fill_n(dweight + k * a.channels, n, 0.0);
    if (dbias) std::fill_n(dbias, n, 0.0);
    for (int64_t t = 0; t < a.length + W - 1; t++) {
      if (t < a.length) {
        const T *dy = (const T *)a.dy + b * a.dy_b + t * a.dy_l + c0;
        float *dpre = ring[t % W];
        int limit = limits[t % W] = reach(t), j = 0;
        bool inside = limit == W - 1 && t >= W - 1;
        for (; j + VW <= n; j += VW) {
          vf g = load(dy + j);
          if (a.silu) {
            vf v = inside ? pre_inside(t, j) : pre(t, limit, j), s = vsigmoid(v);
            g *= s * (1.0f + v * (1.0f - s));
          }
          store(dpre + j, g);
          store(db + j, load(db + j) + g);
          if (inside) {
#pragma GCC unroll 8
            for (int k = 0; k < W; k++)
              store(dw[k] + j, load(dw[k] + j) + g * load(x + (t - k) * a.x_l + j));
          } else {
            for (int k = 0; k <= limit; k++)
              store(dw[k] + j, load(dw[k] + j) + g * input(t, k, j));
          }
        }
        for (; j < n; j++) {
          float g = to_float(dy[j]);
          if (a.silu) {
            float v = pre1(t, limit, j), s = vsigmoid(splat(v))[0];
            g *= s * (1.0f + v * (1.0f - s));
          }
          dpre[j] = g;
          db[j] += g;
          for (int k = 0; k <= limit; k++) dw[k][j] += g * input1(t, k, j);
        }
      } else {
        limits[t % W] = -1;
      }
      int64_t s = t - (W - 1);  // all tokens that look at s are known now
      if (s >= 0) {
        T *dx = (T *)a.dx + b * a.dx_b + s * a.dx_l + c0;
        bool all = true;
        for (int k = 0; k < W; k++) all &= k <= limits[(s + k) % W];
        int j = 0;
        for (; j + VW <= n; j += VW) {
          vf v = {};
#pragma GCC unroll 8
          for (int k = 0; k < W; k++)
            if (all || k <= limits[(s + k) % W])
              v += load(tap(k) + j) * load(ring[(s + k) % W] + j);
          store(dx + j, v);
        }
        for (; j < n; j++) {
          float v = 0;
          for (int k = 0; k < W; k++)
            if (k <= limits[(s + k) % W]) v += tap(k)[j] * ring[(s + k) % W][j];
          from_float(dx + j, v);
        }
      }
      if (t % FLUSH == FLUSH - 1 || t == a.length + W - 2) {
        for (int k = 0; k < W; k++)
          for (int j = 0; j < n; j++)
            dweight[(W - 1 - k) * a.channels + j] += dw[k][j], dw[k][j] = 0;
        for (int j = 0; j < n; j++) {
          if (dbias) dbias[j] += db[j];
          db[j] = 0;
        }
      }
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
