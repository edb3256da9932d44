// Rotary position embedding of a joint projection of queries, keys and values.
//
// A row is one token; its heads stand in groups of [queries | key | value].  Queries and keys
// are rotated and everything is laid out by head, (b, h, l, p), in one pass over memory; the
// backward pass rotates back and writes straight into the joint gradient.

#include <algorithm>
#include <omp.h>

#include "vec.h"

extern "C" {
struct RotaryArgs {
  int64_t length, batch, groups, per_group, head_dim, threads, bf16;
  void *mixed;  // (l, b, groups, per_group + 2, p), contiguous
  const float *cos, *sin;  // (l, p / 2)
  // (b, heads, l, p) with contiguous channels; heads is groups * per_group for q, else groups
  void *q;
  int64_t q_b, q_h, q_l;
  void *k;
  int64_t k_b, k_h, k_l;
  void *v;
  int64_t v_b, v_h, v_l;
};
}

namespace {

// Channel i of the first half and i of the second turn by the token's i-th angle.
template <typename T>
void turn(int half, const T *from, const float *cos, const float *sin, float sign, T *to) {
  int i = 0;
  for (; i + VW <= half; i += VW) {
    vf a = load(from + i), b = load(from + half + i), c = load(cos + i), s = load(sin + i) * sign;
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = to_float(from[i]), b = to_float(from[half + i]), s = sin[i] * sign;
    from_float(to + i, a * cos[i] - b * s);
    from_float(to + half + i, b * cos[i] + a * s);
  }
}

template <typename T>
void run(const RotaryArgs &a, bool backward) {
  int p = (int)a.head_dim, half = p / 2;
  int64_t width = (a.per_group + 2) * p;
#pragma omp parallel for schedule(static) num_threads((int)a.threads) if (a.threads > 1)
  for (int64_t t = 0; t < a.length; t++) {
    const float *cos = a.cos + t * half, *sin = a.sin + t * half;
    for (int64_t b = 0; b < a.batch; b++)
      for (int64_t g = 0; g < a.groups; g++) {
        T *joint = (T *)a.mixed + ((t * a.batch + b) * a.groups + g) * width;
        for (int64_t j = 0; j < a.per_group; j++, joint += p) {
          T *one = (T *)a.q + b * a.q_b + (g * a.per_group + j) * a.q_h + t * a.q_l;
          backward ? turn(half, one, cos, sin, -1.0f, joint) : turn(half, joint, cos, sin, 1.0f, one);
        }
        T *key = (T *)a.k + b * a.k_b + g * a.k_h + t * a.k_l;
        backward ? turn(half, key, cos, sin, -1.0f, joint) : turn(half, joint, cos, sin, 1.0f, key);
        joint += p;
        T *value = (T *)a.v + b * a.v_b + g * a.v_h + t * a.v_l;
        backward ? memcpy(joint, value, p * sizeof(T)) : memcpy(value, joint, p * sizeof(T));
      }
  }
}

}  // namespace

extern "C" {
int64_t rotary_args_size() { return sizeof(RotaryArgs); }
void rotary_forward(const RotaryArgs *a) {
  a->bf16 ? run<uint16_t>(*a, false) : run<float>(*a, false);
}
void rotary_backward(const RotaryArgs *a) {
  a->bf16 ? run<uint16_t>(*a, true) : run<float>(*a, true);
}
}
