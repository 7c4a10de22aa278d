// Elementary functions on fp32 vectors. Infinities and NaN give what the scalar functions give.
#pragma once

#include <cmath>

#include "vec.h"

namespace opmux {

inline vf nearest(vf x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__SSE4_1__)
  return _mm_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return vrndnq_f32(x);
#else
  for (int k = 0; k < kLanes; ++k) x[k] = std::nearbyint(x[k]);
  return x;
#endif
}

// y * 2^n for whole n in [-252, 254]; overflows and underflows as it should.
inline vf scale_by_power_of_two(vf y, vf n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, n);
#else
  const vi whole = __builtin_convertvector(n, vi);
  const vi half = whole >> 1;
  return y * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

namespace detail {
// x = n ln 2 + r with n whole, and e^r - 1 (polynomial of the Cephes library).
struct Reduced { vf n, expm1_r; };

inline Reduced reduce(vf x) {
  // Beyond these bounds e^x is infinity or zero; NaN fails both comparisons and stays.
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -104.5f ? splat(-104.5f) : x;
  const vf n = nearest(x * 1.44269504f);
  // ln 2 in two parts; n times the first is exact.
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return {n, fma(p, r * r, r)};
}
}  // namespace detail

// e^x within one unit in the last place.
inline vf exp(vf x) {
  const detail::Reduced e = detail::reduce(x);
  return scale_by_power_of_two(e.expm1_r + 1.0f, e.n);
}

// e^x - 1, accurate near zero too.
inline vf expm1(vf x) {
  const detail::Reduced e = detail::reduce(x);
  const vf scale = scale_by_power_of_two(splat(1.0f), e.n);
  const vf y = fma(e.expm1_r, scale, scale - 1.0f);
  return x > 88.8f ? exp(x) : y;
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf tanh(vf x) {
  // Near zero the exponential form cancels; there an odd polynomial (Cephes) is used.
  const vf magnitude = x < 0.0f ? -x : x;
  const vf large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  const vf z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const vf small = fma(p * z, x, x);
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

// The complementary error function for x >= 0, relative error about 1e-6 (Numerical Recipes, erfcc).
inline vf erfc_positive(vf x) {
  const vf t = 1.0f / fma(splat(0.5f), x, splat(1.0f));
  vf p = splat(0.17087277f);
  p = fma(p, t, splat(-0.82215223f));
  p = fma(p, t, splat(1.48851587f));
  p = fma(p, t, splat(-1.13520398f));
  p = fma(p, t, splat(0.27886807f));
  p = fma(p, t, splat(-0.18628806f));
  p = fma(p, t, splat(0.09678418f));
  p = fma(p, t, splat(0.37409196f));
  p = fma(p, t, splat(1.00002368f));
  p = fma(p, t, splat(-1.26551223f));
  return t * exp(p - x * x);
}

// The standard normal distribution function.
inline vf normal_cdf(vf x) {
  const vf magnitude = x < 0.0f ? -x : x;
  const vf tail = 0.5f * erfc_positive(magnitude * 0.70710678f);
  return x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace opmux
