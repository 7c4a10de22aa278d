// fp32 vectors, as wide as the variant's registers, and rows of fp32, bf16 or fp16 storage loaded into and stored from them.
//
// Arithmetic (+ - * / comparisons, mask ? a : b) is the compiler's vector extension. Rounding to storage is to nearest even
// and keeps NaN; it is the same in every variant.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace opmux {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using vf = float __attribute__((vector_size(4 * kLanes)));
using vi = int32_t __attribute__((vector_size(4 * kLanes)));
using vu = uint32_t __attribute__((vector_size(4 * kLanes)));
using vh = uint16_t __attribute__((vector_size(2 * kLanes)));  // the bits of bf16 or fp16

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// How much of a vector a load or store touches: all lanes, or the first `n` at the end of a row. Nothing beyond is read or
// written; lanes beyond load as zero.
struct Full {};
struct Part { int n; };

inline vf splat(float x) { return vf{} + x; }

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  vf product = a * b;
#if defined(__x86_64__)
  // Hides the product from reassociation, which would undo the two-part argument reductions of vec_math.h.
  __asm__("" : "+x"(product));
#endif
  return product + c;
#endif
}

inline float sum(vf v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes / 2; half; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

// ---- Storage bits <-> fp32 ----

inline vf from_bf16(vh h) {
#if defined(__AVX512F__)
  // GCC makes five instructions of the conversion below, where two do: an add_rms_norm takes 30 % longer.
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__)
  // The instruction rounds as we do but for subnormal numbers, which it takes for zero.
  constexpr int kSubnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(v, kSubnormal) == 0, 1)) return (vh)_mm512_cvtneps_pbh(v);
#endif
  const vu b = (vu)v;
  const vu rounded = b + 0x7fff + ((b >> 16) & 1);
  return __builtin_convertvector((v == v ? rounded : (b | 0x400000)) >> 16, vh);
}

inline vf from_f16(vh h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return vcvt_f32_f16((float16x4_t)h);
#else
  const vu bits = __builtin_convertvector(h, vu);
  const vu magnitude = bits & 0x7fff;
  const vf subnormal = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
  const vu normal = (magnitude << 13) + (magnitude >= 0x7c00 ? vu{} + (224u << 23) : vu{} + (112u << 23));
  return (vf)((magnitude < 0x400 ? (vu)subnormal : normal) | ((bits & 0x8000) << 16));
#endif
}

inline vh to_f16(vf v) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (vh)vcvt_f16_f32(v);
#else
  const vu sign = (vu)v & 0x80000000u;
  const vu magnitude = (vu)v ^ sign;
  // Adding a number whose last mantissa bit is worth the smallest subnormal makes the addition do the rounding.
  const vu magic = vu{} + (126u << 23);
  const vu subnormal = (vu)((vf)magnitude + (vf)magic) - magic;
  const vu normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  const vu special = magnitude > (255u << 23) ? vu{} + 0x7e00 : vu{} + 0x7c00;
  const vu bits = magnitude >= (143u << 23) ? special : (magnitude < (113u << 23) ? subnormal : normal);
  return __builtin_convertvector(bits | (sign >> 16), vh);
#endif
}

// ---- Loads and stores ----

template <class V, class T>
inline V load_bits(const T* p, Full) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
inline V load_bits(const T* p, Part part) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << part.n) - 1);
  if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_ps(mask, p);
  else return (V)_mm256_maskz_loadu_epi16(mask, p);
#else
  V v = {};
  std::memcpy(&v, p, part.n * sizeof(T));
  return v;
#endif
}

template <class V, class T>
inline void store_bits(T* p, V v, Full) { std::memcpy(p, &v, sizeof v); }

template <class V, class T>
inline void store_bits(T* p, V v, Part part) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << part.n) - 1);
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, mask, (__m512)v);
  else _mm256_mask_storeu_epi16(p, mask, (__m256i)v);
#else
  std::memcpy(p, &v, part.n * sizeof(T));
#endif
}

template <class N> inline vf load(const float* p, N n) { return load_bits<vf>(p, n); }
template <class N> inline vf load(const bf16* p, N n) { return from_bf16(load_bits<vh>(p, n)); }
template <class N> inline vf load(const f16* p, N n) { return from_f16(load_bits<vh>(p, n)); }
template <class T> inline vf load(const T* p) { return load(p, Full{}); }

template <class N> inline void store(float* p, vf v, N n) { store_bits(p, v, n); }
template <class N> inline void store(bf16* p, vf v, N n) { store_bits(p, to_bf16(v), n); }
template <class N> inline void store(f16* p, vf v, N n) { store_bits(p, to_f16(v), n); }
template <class T> inline void store(T* p, vf v) { store(p, v, Full{}); }

// The fp32 value that storage type T would keep of v.
template <class T> inline vf round_to(vf v);
template <> inline vf round_to<float>(vf v) { return v; }
template <> inline vf round_to<bf16>(vf v) { return from_bf16(to_bf16(v)); }
template <> inline vf round_to<f16>(vf v) { return from_f16(to_f16(v)); }

// ---- Interleaved pairs: even and odd elements of 2 n consecutive ones ----

namespace detail {
template <class Index>
constexpr vi lanes(Index index) {
  vi v = {};
  for (int k = 0; k < kLanes; ++k) v[k] = index(k);
  return v;
}
}  // namespace detail

struct Pairs { vf even, odd; };

// The first and the second vector that 2 n elements fill.
inline Full first_half(Full) { return {}; }
inline Full second_half(Full) { return {}; }
inline Part first_half(Part n) { return {2 * n.n < kLanes ? 2 * n.n : kLanes}; }
inline Part second_half(Part n) { return {2 * n.n < kLanes ? 0 : 2 * n.n - kLanes}; }

template <class T, class N>
inline Pairs load_pairs(const T* p, N n) {
  const vf a = load(p, first_half(n)), b = load(p + kLanes, second_half(n));
  return {__builtin_shuffle(a, b, detail::lanes([](int k) { return 2 * k; })),
          __builtin_shuffle(a, b, detail::lanes([](int k) { return 2 * k + 1; }))};
}

template <class T, class N>
inline void store_pairs(T* p, Pairs v, N n) {
  const auto zip = [](int k) { return k / 2 + (k % 2) * kLanes; };
  store(p, __builtin_shuffle(v.even, v.odd, detail::lanes(zip)), first_half(n));
  store(p + kLanes, __builtin_shuffle(v.even, v.odd, detail::lanes(zip) + kLanes / 2), second_half(n));
}

// Calls body(i, Full{}) for every whole vector of a row of d elements and body(i, Part{n}) for the rest.
template <class Body>
inline void for_lanes(int64_t d, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) body(i, Full{});
  if (i < d) body(i, Part{static_cast<int>(d - i)});
}

// Calls body with a null pointer of the storage type that a dtype code names.
template <class Body>
inline void with_dtype(int64_t code, const Body& body) {
  if (code == 0) body(static_cast<float*>(nullptr));
  else if (code == 1) body(static_cast<bf16*>(nullptr));
  else body(static_cast<f16*>(nullptr));
}

}  // namespace opmux
