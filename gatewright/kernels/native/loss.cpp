// Cross-entropy of rows of logits, and its gradient in their place.
//
// A row is a unit of work: maximum, sum of exponentials, then (on request) softmax minus the
// one-hot target times the row's weight, written over the logits.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <omp.h>

#include "vec.h"

extern "C" {
struct LossArgs {
  int64_t rows, vocab, ignore, threads;
  float *logits;  // (rows, vocab), row stride below
  int64_t stride;
  const int64_t *labels;  // (rows)
  float *losses;          // (rows): -log p(label), 0 where ignored; or null
  float *lse;             // (rows): log of the sum of exponentials
  const float *weights;   // (rows) factor of the gradient, or null for 1
};
}

namespace {

float log_sum_exp(int64_t n, const float *p) {
  vf best = splat(-INFINITY);
  int64_t j = 0;
  float top = -INFINITY;
  for (; j + VW <= n; j += VW) {
    vf v = load(p + j);
    best = best > v ? best : v;
  }
  for (; j < n; j++) top = std::max(top, p[j]);
  for (int i = 0; i < VW; i++) top = std::max(top, best[i]);
  if (!std::isfinite(top)) return top;
  vf total = {};
  float rest = 0;
  for (j = 0; j + VW <= n; j += VW) total += vexp(load(p + j) - top);
  for (; j < n; j++) rest += std::exp(p[j] - top);
  return top + std::log(sum(total) + rest);
}

}  // namespace

extern "C" {
int64_t loss_args_size() { return sizeof(LossArgs); }

void loss_forward(const LossArgs *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t r = 0; r < a->rows; r++) {
    const float *row = a->logits + r * a->stride;
    int64_t label = a->labels[r];
    a->lse[r] = log_sum_exp(a->vocab, row);
    if (a->losses) a->losses[r] = label == a->ignore ? 0.0f : a->lse[r] - row[label];
  }
}

void loss_backward(const LossArgs *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t r = 0; r < a->rows; r++) {
    float *row = a->logits + r * a->stride;
    int64_t label = a->labels[r], n = a->vocab, j = 0;
    float w = label == a->ignore ? 0.0f : a->weights ? a->weights[r] : 1.0f;
    if (w == 0.0f) {
      memset(row, 0, sizeof(float) * n);
      continue;
    }
    float lse = a->lse[r];
    for (; j + VW <= n; j += VW) store(row + j, w * vexp(load(row + j) - lse));
    for (; j < n; j++) row[j] = w * std::exp(row[j] - lse);
    row[label] -= w;
  }
}
}
