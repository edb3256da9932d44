// The recurrence S_t = S_{t-1} (diag(w_t) - a_t b_t^T) + v_t k_t^T, o_t = S_t q_t of one
// sequence, forward and backward, on arrays in scratch.
//
// DELTA is the case a = beta diag(w) k, b = k with the written value beta v: S' = S_{t-1} diag(w),
// e = v - S' k, S_t = S' + beta e k^T.  It needs three quarters of the general form's work.

#pragma once
#include "vec.h"

namespace rank_one {

enum Rank { DIAGONAL, DELTA, GENERAL };
enum Decay { NONE, VECTOR, HEAD };  // w = 1; one per key channel; one per head of value rows

constexpr int CHUNK = 16;  // tokens: a tile's states of a chunk stay in the first cache
constexpr int MAX_VECTORS = VW == 16 ? 4 : 8;
constexpr int ROW_MULTIPLE = 8;  // value rows are padded to this

// One sequence.  Widths are padded with zeros: kp to vectors, vp to ROW_MULTIPLE.
struct Sequence {
  int length, kp, vp, heads, head_rows;
  const float *q, *k, *a, *b;  // (length, kp)
  const float *v;              // (length, vp)
  const float *w;              // (length, kp), or (length, heads) for HEAD
  const float *beta;           // (length): DELTA
  const uint8_t *read;         // (length): whether o_t is asked for; null: always
  float *o;                    // (length, vp)
  float *removed;              // (length, vp): u_t = S_{t-1} a_t, for DELTA e_t
  float *checkpoints;          // (ceil(length / CHUNK), vp, kp) or null
  const float *dout;           // (length, vp)
  float *dq, *dk, *da, *db;    // (length, kp), zero at first
  float *dv;                   // (length, vp); for DELTA the gradient of beta e
  float *dw;                   // as w, zero at first
  float *states;               // scratch (CHUNK + 1, 8 rows, kp)
};

// Goes through the sequence forwards (o, removed, checkpoints) or backwards (the gradients).
// DELTA with NONE or VECTOR, GENERAL with VECTOR, DIAGONAL with VECTOR or HEAD decays.
void run(const Sequence &s, Rank rank, Decay decay, bool backward);

// The least width a kernel exists for, in floats.
inline int padded_width(int width) {
  int vectors = 1;
  while (vectors * VW < width) vectors *= 2;
  return vectors * VW;
}
inline int padded_rows(int rows) { return (rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE; }

}  // namespace rank_one
