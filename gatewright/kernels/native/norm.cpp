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

enum Gate { NONE, BEFORE, AFTER };

// One row after the other, each read once from memory: the first pass over it leaves what the
// second needs in scratch.  Groups are whole numbers of vectors.
template <typename T, Gate GATE>
struct Norm {
  const NormArgs &a;
  int d, group;
  float *v, *gate, *slope;  // scratch rows

  Norm(const NormArgs &args, float *scratch, size_t stride) : a(args) {
    d = (int)a.channels, group = (int)a.group;
    v = scratch, gate = v + stride, slope = gate + stride;
  }

  float scale_of(vf squares) const {
    return 1.0f / std::sqrt(sum(squares) / group + (float)a.eps);
  }

  void forward(int64_t r) const {
    const T *__restrict x = (const T *)a.x + r * a.x_r, *__restrict z = (const T *)a.z + r * a.z_r;
    T *__restrict y = (T *)a.y + r * a.y_r;
    const float *__restrict w = a.weight;
    if (a.eps < 0) {
      for (int j = 0; j < d; j += VW) {
        vf q = load(z + j);
        store(y + j, load(x + j) * (q * vsigmoid(q)));
      }
      return;
    }
    float *__restrict scratch = v;
    for (int s = 0; s < d; s += group) {
      vf squares = {};
      for (int j = s; j < s + group; j += VW) {
        vf u = load(x + j);
        if (GATE == BEFORE) {
          vf q = load(z + j);
          u *= q * vsigmoid(q);
        }
        store(scratch + j, u);
        squares += u * u;
      }
      float scale = scale_of(squares);
      for (int j = s; j < s + group; j += VW) {
        vf u = load(scratch + j) * scale * load(w + j);
        if (GATE == AFTER) {
          vf q = load(z + j);
          u *= q * vsigmoid(q);
        }
        store(y + j, u);
      }
    }
  }

  void backward(int64_t r, float *__restrict dweight) const {
    const T *__restrict x = (const T *)a.x + r * a.x_r, *__restrict z = (const T *)a.z + r * a.z_r;
    const T *__restrict dy = (const T *)a.dy + r * a.dy_r;
    T *__restrict dx = (T *)a.dx + r * a.dx_r, *__restrict dz = (T *)a.dz + r * a.dz_r;
    const float *__restrict w = a.weight;
    if (a.eps < 0) {
      for (int j = 0; j < d; j += VW) {
        vf q = load(z + j), s = vsigmoid(q), g = load(dy + j);
        vf xj = load(x + j);
        store(dx + j, g * (q * s));
        store(dz + j, g * xj * (s * (1.0f + q * (1.0f - s))));
      }
      return;
    }
    float *__restrict u_row = v, *__restrict gates = gate, *__restrict slopes = slope;
    for (int s0 = 0; s0 < d; s0 += group) {
      // u goes into the norm, g comes back to what leaves it; sums of u^2 and of g w u
      vf squares = {}, dots = {};
      for (int j = s0; j < s0 + group; j += VW) {
        vf u = load(x + j), g = load(dy + j);
        if (GATE != NONE) {
          vf q = load(z + j), s = vsigmoid(q);
          store(gates + j, q * s);
          store(slopes + j, s * (1.0f + q * (1.0f - s)));
          if (GATE == BEFORE) u *= q * s;
          if (GATE == AFTER) g *= q * s;
        }
        store(u_row + j, u);
        squares += u * u;
        dots += g * load(w + j) * u;
      }
      float scale = scale_of(squares), pull = sum(dots) * scale * scale / group;
      for (int j = s0; j < s0 + group; j += VW) {
        vf u = load(u_row + j), g0 = load(dy + j), g = g0;
        if (GATE == AFTER) g *= load(gates + j);
        vf wj = load(w + j);
        store(dweight + j, load(dweight + j) + g * u * scale);
        if (GATE == AFTER) store(dz + j, g0 * (u * scale) * wj * load(slopes + j));
        vf du = (g * wj - u * pull) * scale;
        if (GATE == BEFORE) {
          vf xj = load(x + j);
          store(dz + j, du * xj * load(slopes + j));
          du *= load(gates + j);
        }
        store(dx + j, du);
      }
    }
  }
};

constexpr int64_t ROWS = 64;  // per unit

template <typename T, Gate GATE>
void run(const NormArgs &a, bool backward) {
  int64_t units = (a.rows + ROWS - 1) / ROWS;
  int threads = (int)std::min<int64_t>(a.threads, units);
  size_t stride = (a.channels + 15) / 16 * 16;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Scratch scratch;
    scratch.begin(4 * stride);
    Norm<T, GATE> norm(a, scratch.take(3 * stride), stride);
    float *dw = scratch.take(stride);
    memset(dw, 0, stride * sizeof(float));
    double *dweight = a.dweight ? a.dweight + omp_get_thread_num() * a.channels : nullptr;
    // static: the order of sums, and so the result, is the same in every run
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units; i++) {
      int64_t end = std::min((i + 1) * ROWS, a.rows);
      for (int64_t r = i * ROWS; r < end; r++) {
        if (backward)
          norm.backward(r, dw);
        else
          norm.forward(r);
      }
      if (backward && dweight)
        for (int64_t j = 0; j < a.channels; j++) dweight[j] += dw[j], dw[j] = 0;
    }
  }
}

template <typename T>
void run(const NormArgs &a, bool backward) {
  if (!a.z) run<T, NONE>(a, backward);
  if (a.z && !a.gate_after) run<T, BEFORE>(a, backward);
  if (a.z && a.gate_after) run<T, AFTER>(a, backward);
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
