// LayerNorm of one short row without its affine part, and backwards.

#pragma once
#include <cmath>

#include "vec.h"

constexpr float LAYER_NORM_EPS = 1e-5f;  // torch.nn.functional.layer_norm's default

// Writes (u - mean) / sd to x and returns 1 / sd.
static float normalise(const float *u, int width, float *x) {
  vf total = {}, squares = {};
  float rest = 0;
  int j = 0;
  for (; j + VW <= width; j += VW) total += load(u + j);
  for (; j < width; j++) rest += u[j];
  float mean = (sum(total) + rest) / width;
  for (rest = 0, j = 0; j + VW <= width; j += VW) {
    vf c = load(u + j) - mean;
    squares += c * c;
  }
  for (; j < width; j++) rest += (u[j] - mean) * (u[j] - mean);
  float inverse = 1.0f / std::sqrt((sum(squares) + rest) / width + LAYER_NORM_EPS);
  for (j = 0; j + VW <= width; j += VW) store(x + j, (load(u + j) - mean) * inverse);
  for (; j < width; j++) x[j] = (u[j] - mean) * inverse;
  return inverse;
}

// Writes the gradient of u from that of x.
static void back_normalise(const float *dx, const float *x, float inverse, int width, float *du) {
  vf total = {}, along = {};
  float rest = 0, rest_along = 0;
  int j = 0;
  for (; j + VW <= width; j += VW) {
    total += load(dx + j);
    along += load(dx + j) * load(x + j);
  }
  for (; j < width; j++) rest += dx[j], rest_along += dx[j] * x[j];
  float mean = (sum(total) + rest) / width, slope = (sum(along) + rest_along) / width;
  for (j = 0; j + VW <= width; j += VW)
    store(du + j, (load(dx + j) - mean - load(x + j) * slope) * inverse);
  for (; j < width; j++) du[j] = (dx[j] - mean - x[j] * slope) * inverse;
}
