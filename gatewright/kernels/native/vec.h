// Vectors as wide as the target has them (AVX-512, AVX, or SSE/NEON width), small matrix
// products on cached blocks, transposes, and conversions from and to bf16.
//
// Only GCC's vector extensions are used, so the one source compiles for every instruction
// set; -march=native decides.  All scratch matrices are row-major, 64-byte aligned, with row
// lengths that are multiples of 16 floats.

#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VW = 16;
#elif defined(__AVX__)
constexpr int VW = 8;
#else
constexpr int VW = 4;
#endif
constexpr int BLOCK = 16;  // every padded size is a multiple of this

typedef float vf __attribute__((vector_size(VW * 4), may_alias));
typedef float vfu __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VW * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VW * 2), may_alias));
typedef uint16_t vhu __attribute__((vector_size(VW * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VW * 4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf splat(float a) { return a - vf{}; }  // a + 0 would cost an addition: -0 + 0 is 0
INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[4] = {};
  for (int i = 0; i < VW; i++) s[i % 4] += v[i];
  return (s[0] + s[1]) + (s[2] + s[3]);
#endif
}

// bf16 is the upper half of a float; rounding is to nearest even.
INLINE vf load(const uint16_t *p) {
  vu wide = __builtin_convertvector(*(const vhu *)p, vu) << 16;
  return (vf)wide;
}
INLINE void store(uint16_t *p, vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi nan = (vi)(v != v);
  rounded = (vu)(((vi)rounded & ~nan) | (nan & 0x7fc0));
  *(vhu *)p = __builtin_convertvector(rounded, vh);
}
INLINE float to_float(float a) { return a; }
INLINE float to_float(uint16_t a) {
  uint32_t bits = (uint32_t)a << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE void from_float(float *p, float a) { *p = a; }
INLINE void from_float(uint16_t *p, float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  *p = a != a ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// s, s + 1, ..., s + VW - 1
INLINE vi lanes(int s) {
#if defined(__AVX512F__)
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + s;
#elif defined(__AVX__)
  return vi{0, 1, 2, 3, 4, 5, 6, 7} + s;
#else
  return vi{0, 1, 2, 3} + s;
#endif
}
INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// exp with an error of about one unit in the last place, for x in [-87.3, 88.7].
INLINE vf vexp_inside(vf x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23 rounds to the nearest integer
  vf k = (x * 1.44269504088896341f + shift) - shift;
  vf r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  // minimax polynomial on [-ln2/2, ln2/2]
  vf q = splat(1.9875691500e-4f);
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  q = q * (r * r) + (r + 1.0f);
  vi e = (__builtin_convertvector(k, vi) + 127) << 23;
  return q * (vf)e;
}
// The same for any x: 0 below the smallest normal float, capped above the largest.
INLINE vf vexp(vf x) {
  vf low = splat(-87.33f), high = splat(88.7f);
  vf inside = x < low ? low : x;
  inside = inside > high ? high : inside;
  return select((vi)(x < low), vf{}, vexp_inside(inside));
}
INLINE vf vsigmoid(vf x) {
  vf low = splat(-87.33f), high = splat(87.33f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  return 1.0f / (1.0f + vexp_inside(-x));
}

template <int N>
using Rows = std::integral_constant<int, N>;

enum Acc { SET, ADD, SCALED };  // C = AB; C += AB; C = diag(rs) C + AB

// C (MR x NV*VW) from A (MR x k; stored k x MR when TA) and B (k x NV*VW).
template <int MR, int NV, bool TA, Acc ACC>
INLINE void micro(int k, const float *__restrict A, size_t lda, const float *__restrict B,
                  size_t ldb, float *__restrict C, size_t ldc, const float *rs) {
  vf acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      if (ACC == SET)
        acc[i][j] = vf{};
      else if (ACC == ADD)
        acc[i][j] = load(C + i * ldc + j * VW);
      else
        acc[i][j] = load(C + i * ldc + j * VW) * rs[i];
    }
  for (int t = 0; t < k; t++) {
    vf b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) b[j] = load(B + t * ldb + j * VW);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      vf a = splat(TA ? A[t * lda + i] : A[i * lda + t]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) acc[i][j] += a * b[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(C + i * ldc + j * VW, acc[i][j]);
}

// Tiles of 5 or 6 rows by four vectors keep the multipliers busy; of 4 by four they do not
// (96 against 116 of 118 GFLOP/s on Zen 4).
template <int NV, bool TA, Acc ACC>
static void panel(int m, int k, const float *A, size_t lda, const float *B, size_t ldb, float *C,
                  size_t ldc, const float *rs) {
  for (int i = 0; i < m; i += BLOCK) {
    auto rows = [&](auto count, int from) {
      int r = i + from;
      micro<decltype(count)::value, NV, TA, ACC>(k, TA ? A + r : A + r * lda, lda, B, ldb,
                                                 C + r * ldc, ldc, ACC == SCALED ? rs + r : rs);
    };
    if (NV * VW >= 64 || VW < 16) {
      rows(Rows<6>(), 0);
      rows(Rows<5>(), 6);
      rows(Rows<5>(), 11);
    } else if (NV > 1) {
      rows(Rows<8>(), 0);
      rows(Rows<8>(), 8);
    } else {
      rows(Rows<16>(), 0);
    }
  }
}

// m and n are multiples of 16.  rs: one factor per row of C (SCALED only).
template <bool TA, Acc ACC>
static void gemm(int m, int n, int k, const float *A, size_t lda, const float *B, size_t ldb,
                 float *C, size_t ldc, const float *rs = nullptr) {
  int j = 0;
  if (VW == 16) {
    for (; j + 64 <= n; j += 64) panel<4, TA, ACC>(m, k, A, lda, B + j, ldb, C + j, ldc, rs);
    for (; j + 48 <= n; j += 48) panel<3, TA, ACC>(m, k, A, lda, B + j, ldb, C + j, ldc, rs);
    for (; j + 32 <= n; j += 32) panel<2, TA, ACC>(m, k, A, lda, B + j, ldb, C + j, ldc, rs);
    for (; j < n; j += 16) panel<1, TA, ACC>(m, k, A, lda, B + j, ldb, C + j, ldc, rs);
  } else {
    for (; j < n; j += 2 * VW) panel<2, TA, ACC>(m, k, A, lda, B + j, ldb, C + j, ldc, rs);
  }
}

// T (cols x rows, leading dimension ldt) = M^T; rows and cols are multiples of 4.
static void transpose(int rows, int cols, const float *M, size_t ldm, float *T, size_t ldt) {
  for (int i = 0; i < rows; i += 4)
    for (int j = 0; j < cols; j += 4) {
#if defined(__SSE__)
      __m128 a = _mm_loadu_ps(M + i * ldm + j), b = _mm_loadu_ps(M + (i + 1) * ldm + j);
      __m128 c = _mm_loadu_ps(M + (i + 2) * ldm + j), d = _mm_loadu_ps(M + (i + 3) * ldm + j);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(T + j * ldt + i, a);
      _mm_storeu_ps(T + (j + 1) * ldt + i, b);
      _mm_storeu_ps(T + (j + 2) * ldt + i, c);
      _mm_storeu_ps(T + (j + 3) * ldt + i, d);
#else
      for (int r = 0; r < 4; r++)
        for (int s = 0; s < 4; s++) T[(j + s) * ldt + i + r] = M[(i + r) * ldm + j + s];
#endif
    }
}

// Copies a strided (rows x cols) block into scratch (padded_rows x padded_cols), zeros beyond.
template <typename T>
static void pack(int rows, int cols, const T *src, ptrdiff_t stride, int padded_rows,
                 int padded_cols, float *dst) {
  for (int i = 0; i < rows; i++) {
    const T *s = src + i * stride;
    float *d = dst + i * padded_cols;
    int j = 0;
    for (; j + VW <= cols; j += VW) store(d + j, load(s + j));
    for (; j < cols; j++) d[j] = to_float(s[j]);
    for (; j < padded_cols; j++) d[j] = 0;
  }
  memset(dst + (size_t)rows * padded_cols, 0,
         sizeof(float) * (size_t)(padded_rows - rows) * padded_cols);
}

// A grow-only aligned buffer per thread, handed out piece by piece.
class Scratch {
 public:
  void begin(size_t floats) {
    if (floats > size_) {
      free(base_);
      size_ = 0;
      base_ = (float *)aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
      if (!base_) throw std::bad_alloc();
      size_ = floats;
    }
    used_ = 0;
  }
  float *take(size_t floats) {
    float *p = base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    return p;
  }
  ~Scratch() { free(base_); }

 private:
  float *base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};
