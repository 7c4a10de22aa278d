// Rows of fp32, bf16 or fp16 to 8-bit floats and their scales. Include it in sources with the flags -ffp-contract=off
// -fno-associative-math only: the results are PyTorch's, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "abi.h"
#include "vec.h"

namespace opmux {

// An e4m3 format: the largest value that is used, and the exponent field (of an fp32) of its smallest normal number.
struct E4M3FN {
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kMinNormal = 121;
};
struct E4M3FNUZ {  // no negative zero, whose code is NaN instead
  static constexpr float kMax = 224.0f;
  static constexpr uint32_t kMinNormal = 120;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Calls body with a null pointer of the format that a code (FORMAT_CODE in kernels_cpu.py) names.
template <class Body>
void with_format(int64_t code, const Body& body) {
  if (code == 0) body(static_cast<E4M3FN*>(nullptr));
  else body(static_cast<E4M3FNUZ*>(nullptr));
}

// v, saturated at F::kMax and rounded to nearest even. The code is in the low byte.
template <class F>
vu encode(vf v) {
  const vu most = (vu)splat(F::kMax);
  const vu sign = ((vu)v >> 24) & 0x80;
  vu magnitude = (vu)v & 0x7fffffff;
  magnitude = magnitude < most ? magnitude : most;  // in integers: one instruction, and NaN is put back below
  // Adding a number whose last mantissa bit is worth the smallest subnormal makes the addition do the rounding.
  const vu magic = vu{} + ((F::kMinNormal + 20) << 23);
  const vu subnormal = (vu)((vf)magnitude + (vf)magic) - magic;
  const vu normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - ((F::kMinNormal - 1) << 23)) >> 20;
  const vu code = (vi)magnitude < static_cast<int32_t>(F::kMinNormal << 23) ? subnormal : normal;
  if constexpr (std::is_same_v<F, E4M3FN>) return (v == v ? code : vu{} + 0x7f) | sign;
  else return v == v ? code | (code != 0 ? sign : vu{}) : vu{} + 0x80;
}

using vb = uint8_t __attribute__((vector_size(kLanes)));

inline void store_codes(uint8_t* p, vu codes, Full) {
  const vb bytes = __builtin_convertvector(codes, vb);
  std::memcpy(p, &bytes, sizeof bytes);
}

inline void store_codes(uint8_t* p, vu codes, Part part) {
  const vb bytes = __builtin_convertvector(codes, vb);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1u << part.n) - 1), (__m128i)bytes);
#else
  std::memcpy(p, &bytes, part.n);
#endif
}

// Magnitudes of storage bits, in unsigned order: infinity is above all numbers, NaN above infinity.
inline float from_magnitude(const float*, uint32_t bits) { return float_of(bits); }
inline float from_magnitude(const bf16*, uint32_t bits) { return float_of(bits << 16); }
inline float from_magnitude(const f16*, uint32_t bits) { return from_f16(vh{} + static_cast<uint16_t>(bits))[0]; }

template <class V, class X>
float largest(const X* x, int64_t n, V mask) {
  constexpr int kStep = sizeof(V) / sizeof(X);
  static_assert(kStep == kLanes);
  V most[2] = {};
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    for (int k = 0; k < 2; ++k) {
      const V v = load_bits<V>(x + i + k * kStep, Full{}) & mask;
      most[k] = v > most[k] ? v : most[k];
    }
  }
  for_lanes(n - i, [&](int64_t k, auto part) {
    const V v = load_bits<V>(x + i + k, part) & mask;
    most[0] = v > most[0] ? v : most[0];
  });
  V all = most[0] > most[1] ? most[0] : most[1];
  for (int half = kStep / 2; half; half /= 2) {
    V other, order;
    for (int k = 0; k < kStep; ++k) order[k] = k ^ half;
    other = __builtin_shuffle(all, order);
    all = all > other ? all : other;
  }
  return from_magnitude(x, all[0]);
}

// The largest absolute value, NaN if there is one, 0 of nothing.
inline float largest(const float* x, int64_t n) { return largest<vi>(x, n, vi{} + 0x7fffffff); }
template <class X>
float largest(const X* x, int64_t n) { return largest<vh>(x, n, vh{} + static_cast<uint16_t>(0x7fff)); }

struct Quantization {
  uint8_t* out;
  float* scales;  // [rows, groups]: written
  const float* given;  // or read, if this is not null: [matrix_rows / block_rows, groups]
  int64_t width, group, groups;  // columns that share a scale, and how many such groups a row has
  int64_t block_rows, matrix_rows;
  float bound;  // of the largest absolute value
  bool divide;  // by the scale; otherwise multiply by its reciprocal
  bool power_of_two;
};

template <class F>
float dynamic_scale(const Quantization& q, float most) {
  constexpr float kLeast = static_cast<float>(1.0 / (static_cast<double>(F::kMax) * 512.0));
  if (std::isnan(q.bound) || most > q.bound) most = q.bound;
  float scale = most / F::kMax;
  if (scale < kLeast) scale = kLeast;
  if (q.power_of_two && std::isfinite(scale)) {
    const uint32_t bits = bits_of(scale);
    scale = float_of((bits + 0x7fffff) & 0x7f800000);
  }
  return scale;
}

// Encodes value(i, n), the scaled elements of a row.
template <class F, class Value>
void encode_row(uint8_t* out, int64_t width, const Value& value) {
  for_lanes(width, [&](int64_t i, auto n) { store_codes(out + i, encode<F>(value(i, n)), n); });
}

// One copy for the kernels that share it: it is most of their code.
template <class F, class X>
__attribute__((noinline)) void quantize_row(const Quantization& q, int64_t row, const X* x) {
  uint8_t* out = q.out + row * q.width;
  const float* scales = q.given ? q.given + row % q.matrix_rows / q.block_rows * q.groups : q.scales + row * q.groups;
  if (q.given && q.group == 1) {
    encode_row<F>(out, q.width, [&](int64_t i, auto n) { return load(x + i, n) * (1.0f / load(scales + i, n)); });
    return;
  }
  const auto columns = [&](int64_t g) { return std::min(q.group, q.width - g * q.group); };
  if (!q.given) {
    // All of them first: each is a chain of dependent instructions, and the processor works on several chains at once.
    float* made = q.scales + row * q.groups;
    for (int64_t g = 0; g < q.groups; ++g) made[g] = dynamic_scale<F>(q, largest(x + g * q.group, columns(g)));
  }
  for (int64_t g = 0; g < q.groups; ++g) {
    const X* from = x + g * q.group;
    const float scale = scales[g];
    if (q.divide) {
      encode_row<F>(out + g * q.group, columns(g), [&](int64_t i, auto n) { return load(from + i, n) / scale; });
    } else {
      const float factor = 1.0f / scale;
      encode_row<F>(out + g * q.group, columns(g), [&](int64_t i, auto n) { return load(from + i, n) * factor; });
    }
  }
}

// The arguments of a quantization, in this order: out, scales or null, given or null, width, group, groups, block_rows,
// matrix_rows, bound, divide, power_of_two. The fields of Quantization say what they are.
inline Quantization read_quantization(Reader& in) {
  Quantization q{};
  q.out = in.ptr<uint8_t>();
  q.scales = in.ptr<float>();
  q.given = in.ptr<float>();
  q.width = in.i();
  q.group = in.i();
  q.groups = in.i();
  q.block_rows = in.i();
  q.matrix_rows = in.i();
  q.bound = in.f();
  q.divide = in.i();
  q.power_of_two = in.i();
  return q;
}

}  // namespace opmux
