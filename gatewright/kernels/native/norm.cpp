// RMSNorm per group with a SiLU gate before or after it, and the SiLU gate alone.
//
// A row is one token; groups of it are normalised on their own.  The backward pass recomputes
// gate and scale from the inputs.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct NormArgs {
  int64_t rows, channels, group, gate_after, threads, bf16;
  double eps;              // negative: no normalisation, only the gate
  const void *x;           // (rows, d); row strides below
  int64_t x_r;
  const void *z;  // or null
  int64_t z_r;
  const float *weight;  // (d)
  void *y;
  int64_t y_r;
  const void *dy;
  int64_t dy_r;
  void *dx;
  int64_t dx_r;
  void *dz;
  int64_t dz_r;
  double *dweight;  // (threads, d)
};
}

namespace {

template <typename T>
struct Norm {
  const NormArgs &a;
  int d, group;
  // scratch rows of one thread
  float *v, *gate, *g;
  explicit Norm(const NormArgs &args, float *scratch) : a(args) {
    d = (int)a.channels, group = (int)a.group;
    int stride = (d + 15) / 16 * 16;
    v = scratch, gate = v + stride, g = gate + stride;
  }

  static void widen(int n, const T *src, float *dst) {
    int j = 0;
    for (; j + VW <= n; j += VW) store(dst + j, load(src + j));
    for (; j < n; j++) dst[j] = to_float(src[j]);
  }
  static void narrow(int n, const float *src, T *dst) {
    int j = 0;
    for (; j + VW <= n; j += VW) store(dst + j, load(src + j));
    for (; j < n; j++) from_float(dst + j, src[j]);
  }

  // gate = silu(z); with slope, g2 = d silu / dz
  void read_gate(int64_t r, float *slope) {
    const T *z = (const T *)a.z + r * a.z_r;
    widen(d, z, gate);
    for (int j = 0; j < d; j += VW) {  // rows are padded, so whole vectors are safe
      vf q = load(gate + j), s = vsigmoid(q);
      if (slope) store(slope + j, s * (1.0f + q * (1.0f - s)));
      store(gate + j, q * s);
    }
  }

  // Two partial sums hide the latency of additions.
  static float mean_square(int n, const float *p) {
    vf s0 = {}, s1 = {};
    int j = 0;
    for (; j + 2 * VW <= n; j += 2 * VW) {
      s0 += load(p + j) * load(p + j);
      s1 += load(p + j + VW) * load(p + j + VW);
    }
    float rest = 0;
    for (; j < n; j++) rest += p[j] * p[j];
    return (sum(s0 + s1) + rest) / n;
  }

  void multiply(float *p, const float *q) const {
    for (int j = 0; j < d; j += VW) store(p + j, load(p + j) * load(q + j));
  }

  void forward(int64_t r) {
    widen(d, (const T *)a.x + r * a.x_r, v);
    if (a.z) read_gate(r, nullptr);
    if (a.z && !a.gate_after) multiply(v, gate);
    if (a.eps >= 0)
      for (int s = 0; s < d; s += group) {
        float scale = 1.0f / std::sqrt(mean_square(group, v + s) + (float)a.eps);
        int j = s, end = s + group;
        for (; j + VW <= end; j += VW) store(v + j, load(v + j) * scale * load(a.weight + j));
        for (; j < end; j++) v[j] *= scale * a.weight[j];
      }
    if (a.z && a.gate_after) multiply(v, gate);
    narrow(d, v, (T *)a.y + r * a.y_r);
  }

  void backward(int64_t r, float *slope, float *x, float *dweight) {
    widen(d, (const T *)a.x + r * a.x_r, x);
    widen(d, (const T *)a.dy + r * a.dy_r, g);
    memcpy(v, x, sizeof(float) * d);
    if (a.z) read_gate(r, slope);
    if (a.z && !a.gate_after) multiply(v, gate);
    // from here g is the gradient of what came out last, v what went into the norm
    for (int s = 0; a.eps >= 0 && s < d; s += group) {
      float scale = 1.0f / std::sqrt(mean_square(group, v + s) + (float)a.eps);
      vf dots = {};
      float rest = 0;
      int j = s, end = s + group;
      // v := normalised, g := gradient of normalised
      for (; j + VW <= end; j += VW) {
        vf n = load(v + j) * scale, go = load(g + j), w = load(a.weight + j);
        if (a.z && a.gate_after) {
          store(slope + j, load(slope + j) * go * n * w);  // dz
          go *= load(gate + j);
        }
        store(dweight + j, load(dweight + j) + go * n);
        go *= w;
        dots += go * n;
        store(v + j, n);
        store(g + j, go);
      }
      for (; j < end; j++) {
        float n = v[j] * scale, go = g[j];
        if (a.z && a.gate_after) {
          slope[j] *= go * n * a.weight[j];
          go *= gate[j];
        }
        dweight[j] += go * n;
        go *= a.weight[j];
        rest += go * n;
        v[j] = n;
        g[j] = go;
      }
      float mean = (sum(dots) + rest) / group;
      j = s;
      for (; j + VW <= end; j += VW)
        store(g + j, (load(g + j) - load(v + j) * mean) * scale);
      for (; j < end; j++) g[j] = (g[j] - v[j] * mean) * scale;
    }
    if (a.z && !a.gate_after) {
      multiply(slope, g);
      multiply(slope, x);
      multiply(g, gate);
    }
    narrow(d, g, (T *)a.dx + r * a.dx_r);
    if (a.z) narrow(d, slope, (T *)a.dz + r * a.dz_r);
  }
};

constexpr int64_t ROWS = 64;  // per unit

template <typename T>
void run(const NormArgs &a, bool backward) {
  int64_t units = (a.rows + ROWS - 1) / ROWS;
  int threads = (int)std::min<int64_t>(a.threads, units);
  size_t stride = (a.channels + 15) / 16 * 16;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Scratch scratch;
    scratch.begin(6 * stride);
    float *rows = scratch.take(3 * stride);
    float *slope = scratch.take(stride), *x = scratch.take(stride), *dw = scratch.take(stride);
    memset(rows, 0, 6 * stride * sizeof(float));
    Norm<T> norm(a, rows);
    double *dweight = a.dweight ? a.dweight + omp_get_thread_num() * a.channels : nullptr;
    // static: the order of sums, and so the result, is the same in every run
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units; i++) {
      int64_t end = std::min((i + 1) * ROWS, a.rows);
      for (int64_t r = i * ROWS; r < end; r++) {
        if (backward)
          norm.backward(r, slope, x, dw);
        else
          norm.forward(r);
      }
      if (backward && dweight)
        for (int64_t j = 0; j < a.channels; j++) dweight[j] += dw[j], dw[j] = 0;
    }
  }
}

}  // namespace

extern "C" {
int64_t norm_args_size() { return sizeof(NormArgs); }
void norm_forward(const NormArgs *a) {
  a->bf16 ? run<uint16_t>(*a, false) : run<float>(*a, false);
}
void norm_backward(const NormArgs *a) {
  a->bf16 ? run<uint16_t>(*a, true) : run<float>(*a, true);
}
}
