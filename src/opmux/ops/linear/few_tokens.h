// Dot products of weight rows with a few tokens: each weight is read once, straight from memory, which is what such a
// product costs.
#pragma once

#include <type_traits>

#include "vec.h"

namespace opmux {

// Weights of type T and tokens as fp32.
template <class T>
struct Dot {
  using Token = float;
  static constexpr int kStep = kLanes;
  template <class N>
  static vf multiply_add(vf acc, const Token* x, const T* w, N n) { return fma(load(x, n), load(w, n), acc); }
};

#if defined(__AVX512BF16__)
// Two bf16 a lane. The instruction takes subnormal inputs (below 1.2e-38) as zero.
template <>
struct Dot<bf16> {
  using Token = bf16;
  static constexpr int kStep = 2 * kLanes;
  static vf multiply_add(vf acc, const bf16* x, const bf16* w, Full) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(w));
  }
  static vf multiply_add(vf acc, const bf16* x, const bf16* w, Part part) {
    const auto mask = static_cast<__mmask32>((1ull << part.n) - 1);
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_maskz_loadu_epi16(mask, x), (__m512bh)_mm512_maskz_loadu_epi16(mask, w));
  }
};
#endif

inline float total(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  return sum(v);
#endif
}

// Fetching this far ahead, into the second-level cache, reads at the speed of a plain read; rows side by side read at half.
constexpr int64_t kAheadBytes = 4096;

// out[m * out_stride + r] = weight row r . token m, for M tokens and R rows.
template <class T, int M, int R>
inline void dot(const typename Dot<T>::Token* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, float* out,
                int64_t out_stride) {
  using D = Dot<T>;
  // Enough independent sums to hide the latency of a multiply-add.
  constexpr int U = M == 1 ? 4 : M * R <= 4 ? 2 : 1;
  vf acc[M][R][U] = {};
  const char* coming = reinterpret_cast<const char*>(w) + kAheadBytes;
  const auto step = [&](int64_t k, int u, auto n) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r, coming += D::kStep * sizeof(T)) {
      __builtin_prefetch(coming, 0, 2);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][r][u] = D::multiply_add(acc[m][r][u], x + m * x_stride + k, w + r * w_stride + k, n);
    }
  };
  int64_t k = 0;
  for (; k + U * D::kStep <= in; k += U * D::kStep) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) step(k + u * D::kStep, u, Full{});
  }
  for (; k + D::kStep <= in; k += D::kStep) step(k, 0, Full{});
  if (k < in) step(k, 0, Part{static_cast<int>(in - k)});
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      vf s = acc[m][r][0];
      for (int u = 1; u < U; ++u) s += acc[m][r][u];
      out[m * out_stride + r] = total(s);
    }
  }
}

template <class T, int M>
inline void dot_rows(const typename Dot<T>::Token* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t rows, int64_t in,
                     float* out, int64_t out_stride) {
  // With eight tokens the tokens' loads limit, and two rows share them; with fewer, reading one row after the other does.
  constexpr int R = M == 8 && kLanes == 16 ? 2 : 1;
  int64_t r = 0;
  for (; r + R <= rows; r += R) dot<T, M, R>(x, x_stride, w + r * w_stride, w_stride, in, out + r, out_stride);
  for (; r < rows; ++r) dot<T, M, 1>(x, x_stride, w + r * w_stride, w_stride, in, out + r, out_stride);
}

// out[m * out_stride + r] = weight row r . token m. The rows stay in the cache between groups of eight tokens.
template <class T>
inline void dots(const typename Dot<T>::Token* x, int64_t x_stride, int64_t tokens, const T* w, int64_t w_stride, int64_t rows,
                 int64_t in, float* out, int64_t out_stride) {
  const auto group = [&](auto m) {
    constexpr int M = decltype(m)::value;
    dot_rows<T, M>(x, x_stride, w, w_stride, rows, in, out, out_stride);
    tokens -= M, x += M * x_stride, out += M * out_stride;
  };
  while (tokens >= 8) group(std::integral_constant<int, 8>{});
  if (tokens >= 4) group(std::integral_constant<int, 4>{});
  if (tokens == 3) group(std::integral_constant<int, 3>{});
  if (tokens == 2) group(std::integral_constant<int, 2>{});
  if (tokens == 1) group(std::integral_constant<int, 1>{});
}

}  // namespace opmux
