// One row of the RMS norm, for the norm alone and for the norm that quantizes. Include it in sources with the flags
// -ffp-contract=off -fno-associative-math only: each rounding is where PyTorch's own body has it.
#pragma once

#include <cmath>
#include <type_traits>

#include "abi.h"
#include "vec.h"

namespace opmux {

struct RmsNorm {
  const void* x;
  const void* residual;  // or null
  const void* weight;    // or null
  void* new_residual;    // where there is a residual; contiguous
  int64_t width, x_stride, residual_stride, variance_size;
  float eps, weight_offset;
  int64_t cast;  // the dtype in which the product with the weight is taken; F32: no rounding before the end
  bool residual_is_fp32, weight_is_fp32, round_sum;
};

struct NoWeight {};
template <class N> vf load(const NoWeight*, N) { return splat(1.0f); }

// The fp32 value that the storage type named by a dtype code would keep of v.
inline vf round_as(int64_t dtype, vf v) {
  if (dtype == BF16) return round_to<bf16>(v);
  if (dtype == F16) return round_to<f16>(v);
  return v;
}

template <class T> constexpr int64_t kCode = F32;
template <> constexpr inline int64_t kCode<bf16> = BF16;
template <> constexpr inline int64_t kCode<f16> = F16;

// The flags of p are tested for every vector: the branches predict perfectly, and a copy of the loops for each combination
// would take longer to compile than all other kernels together.
template <class X, class W>
void rms_norm_row(const RmsNorm& p, int64_t row, X* out) {
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  const int64_t residual_row = row * p.residual_stride;
  const W* weight = static_cast<const W*>(p.weight);
  X* new_residual = p.residual ? static_cast<X*>(p.new_residual) + row * p.width : nullptr;

  const auto value = [&](int64_t i, auto n) {
    vf v = load(x + i, n);
    if (p.residual) {
      if (p.residual_is_fp32) v += load(static_cast<const float*>(p.residual) + residual_row + i, n);
      else v += load(static_cast<const X*>(p.residual) + residual_row + i, n);
      if (p.round_sum) v = round_to<X>(v);
    }
    return v;
  };

  vf squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= p.variance_size; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      const vf v = value(i + k * kLanes, Full{});
      squares[k] = fma(v, v, squares[k]);
    }
  }
  for_lanes(p.variance_size - i, [&](int64_t k, auto n) {
    const vf v = value(i + k, n);
    squares[0] = fma(v, v, squares[0]);
  });
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(p.variance_size) + p.eps);

  for_lanes(p.width, [&](int64_t k, auto n) {
    const vf v = value(k, n);
    if (new_residual) store(new_residual + k, v, n);
    vf y = v * scale;
    if constexpr (!std::is_same_v<W, NoWeight>) {
      y = round_as(p.cast, y) * (load(weight + k, n) + p.weight_offset);
      if (p.cast != kCode<X>) y = round_as(p.cast, y);
    }
    store(out + k, y, n);
  });
}

// Calls body with a null pointer of the type that stands for p's weight.
template <class X, class Body>
void with_weight(const RmsNorm& p, const Body& body) {
  if (!p.weight) body(static_cast<NoWeight*>(nullptr));
  else if (p.weight_is_fp32) body(static_cast<float*>(nullptr));
  else body(static_cast<X*>(nullptr));
}

// The arguments of a norm, in this order: x, x_stride, residual or null, residual_stride, residual_is_fp32, weight or null,
// weight_is_fp32, width, variance_size, eps, weight_offset, cast, round_sum.
//
// y = v / sqrt(mean(v[:variance_size]^2) + eps) * (weight + weight_offset), in fp32, v = x or x + residual. The sum is kept
// in fp32 or (round_sum) rounded to x's dtype. The normalised value and the product are rounded to the dtype `cast`, which
// F32 leaves as they are; the result is rounded to x's dtype. Residual and weight have x's dtype or fp32.
inline RmsNorm read_rms_norm(Reader& in) {
  RmsNorm p{};
  p.x = in.ptr<void>();
  p.x_stride = in.i();
  p.residual = in.ptr<void>();
  p.residual_stride = in.i();
  p.residual_is_fp32 = in.i();
  p.weight = in.ptr<void>();
  p.weight_is_fp32 = in.i();
  p.width = in.i();
  p.variance_size = in.i();
  p.eps = in.f();
  p.weight_offset = in.f();
  p.cast = in.i();
  p.round_sum = in.i();
  return p;
}

}  // namespace opmux
