// One token of a Mamba-2 mixer between its projections: convolution, state update, gated norm.
//
// A batch row is a unit of work.  The cost is that of reading and writing the states once; it
// does not depend on how many tokens came before.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct StepArgs {
  int64_t batch, heads, head_dim, groups, d_state;
  int64_t width, history, norm_group, threads, softplus;
  double dt_min, dt_max, eps;
  // The mixer's input projection [z | x | B | C | dt] (b, ...), and its output (b, h * p).
  const float *zxbcdt;
  int64_t zxbcdt_b;
  float *out;
  int64_t out_b;
  float *conv_state;  // (b, d, history), newest last
  const float *conv_weight;  // (d, w)
  const float *conv_bias;    // (d) or null
  const float *dt_bias;      // (h) or null
  const float *A_log;        // (h): A = -exp(A_log)
  const float *D;            // (h)
  const float *norm_weight;  // (h * p)
  float *state;              // (b, h, p, n)
};
struct StateStepArgs {
  int64_t batch, heads, head_dim, groups, d_state, threads;
  float *state;    // (b, h, p, n)
  const float *x;  // (b, h, p), strides below
  int64_t x_b, x_h;
  const float *dt;  // (b, h), discretised
  const float *A;   // (h)
  const float *B;
  int64_t B_b, B_g;
  const float *C;
  int64_t C_b, C_g;
  const float *D;  // (h, p) or null
  float *y;        // (b, h, p)
};
}

namespace {

// S = alpha S + u B^T and y = S C + D x for one head: S (p, n), u = dt x; D has `d_step` 0 when
// one value serves all of p.
void update(int P, int N, float alpha, float dt, const float *x, const float *B, const float *C,
            const float *D, int d_step, float *S, float *y) {
  for (int i = 0; i < P; i++) {
    float *s = S + (size_t)i * N;
    float u = dt * x[i], rest = 0;
    vf total = {};
    int j = 0;
    for (; j + VW <= N; j += VW) {
      vf v = alpha * load(s + j) + u * load(B + j);
      store(s + j, v);
      total += v * load(C + j);
    }
    for (; j < N; j++) {
      s[j] = alpha * s[j] + u * B[j];
      rest += s[j] * C[j];
    }
    y[i] = sum(total) + rest + (D ? D[i * d_step] * x[i] : 0.0f);
  }
}

float silu(float v) { return v / (1.0f + std::exp(-v)); }

void conv(const StepArgs &a, int channels, const float *in, float *state, float *out) {
  int w = (int)a.width, s = (int)a.history;
  for (int c = 0; c < channels; c++) {
    float *past = state + (size_t)c * s;
    const float *taps = a.conv_weight + (size_t)c * w;
    float v = (a.conv_bias ? a.conv_bias[c] : 0.0f) + taps[w - 1] * in[c];
    for (int k = 0; k < w - 1; k++) v += taps[k] * past[s - w + 1 + k];
    for (int k = 0; k + 1 < s; k++) past[k] = past[k + 1];
    past[s - 1] = in[c];
    out[c] = v;
  }
  int c = 0;
  for (; c + VW <= channels; c += VW) {
    vf v = load(out + c);
    store(out + c, v * vsigmoid(v));
  }
  for (; c < channels; c++) out[c] = silu(out[c]);
}

void row(const StepArgs &a, int64_t b, float *xBC) {
  int H = (int)a.heads, P = (int)a.head_dim, G = (int)a.groups, N = (int)a.d_state;
  int inner = H * P, channels = inner + 2 * G * N;
  const float *z = a.zxbcdt + b * a.zxbcdt_b, *dt_raw = z + inner + channels;
  float *out = a.out + b * a.out_b;
  conv(a, channels, z + inner, a.conv_state + b * channels * a.history, xBC);
  const float *x = xBC, *B = xBC + inner, *C = B + G * N;
  for (int h = 0; h < H; h++) {
    double dt = dt_raw[h] + (a.dt_bias ? a.dt_bias[h] : 0.0f);
    if (a.softplus && dt <= 20) dt = std::log1p(std::exp(dt));
    dt = std::min(std::max(dt, a.dt_min), a.dt_max);
    int g = h / (H / G);
    double alpha = std::exp(-dt * std::exp((double)a.A_log[h]));
    update(P, N, (float)alpha, (float)dt, x + h * P, B + g * N, C + g * N, a.D + h, 0, a.state + (b * H + h) * P * N, out + h * P);
  }
  for (int s = 0; s < inner; s += (int)a.norm_group) {
    float square = 0;
    int end = s + (int)a.norm_group, j = s;
    vf squares = {};
    for (; j + VW <= end; j += VW) {
      vf q = load(z + j), v = load(out + j) * q * vsigmoid(q);
      store(out + j, v);
      squares += v * v;
    }
    for (; j < end; j++) {
      out[j] *= silu(z[j]);
      square += out[j] * out[j];
    }
    float scale = 1.0f / std::sqrt((sum(squares) + square) / a.norm_group + (float)a.eps);
    for (j = s; j < end; j++) out[j] *= scale * a.norm_weight[j];
  }
}

}  // namespace

extern "C" {
int64_t step_args_size() { return sizeof(StepArgs); }
int64_t state_step_args_size() { return sizeof(StateStepArgs); }

void mixer_step(const StepArgs *a) {
  int threads = (int)std::min<int64_t>(a->threads, a->batch);
  size_t channels = a->heads * a->head_dim + 2 * a->groups * a->d_state;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Scratch scratch;
    scratch.begin(channels + 64);
    float *xBC = scratch.take(channels);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < a->batch; b++) row(*a, b, xBC);
  }
}

void state_step(const StateStepArgs *a) {
  int64_t units = a->batch * a->heads;
  int P = (int)a->head_dim, N = (int)a->d_state;
  int threads = (int)std::min<int64_t>(a->threads, units);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; i++) {
    int64_t b = i / a->heads, h = i % a->heads, g = h / (a->heads / a->groups);
    float dt = a->dt[i];
    update(P, N, (float)std::exp((double)dt * a->A[h]), dt, a->x + b * a->x_b + h * a->x_h,
           a->B + b * a->B_b + g * a->B_g, a->C + b * a->C_b + g * a->C_g,
           a->D ? a->D + h * P : nullptr, 1, a->state + i * P * N, a->y + i * P);
  }
}
}
