// flags: -O2 -ffp-contract=off -fno-associative-math
// RMS norm. Without contraction and reassociation, so that each rounding is where PyTorch's own body has it.
#include <cmath>
#include <type_traits>

#include "abi.h"
#include "memory.h"
#include "threads.h"
#include "vec.h"

namespace opmux {
namespace {

struct Problem {
  const void* x;
  const void* residual;  // or null
  const void* weight;
  void* out;
  void* new_residual;
  int64_t rows, width, x_stride, residual_stride, variance_size;
  float eps, weight_offset;
  bool cast_first, round_sum;
};

struct NoWeight {};
template <class N> vf load(const NoWeight*, N) { return splat(1.0f); }

// The flags of p are tested for every vector: the branches predict perfectly, and a copy of the loops for each combination
// would take longer to compile than all other kernels together.
template <class X, class W>
void norm_row(const Problem& p, int64_t row) {
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  const X* residual = p.residual ? static_cast<const X*>(p.residual) + row * p.residual_stride : nullptr;
  const W* weight = static_cast<const W*>(p.weight);
  X* out = static_cast<X*>(p.out) + row * p.width;
  X* new_residual = p.residual ? static_cast<X*>(p.new_residual) + row * p.width : nullptr;

  const auto value = [&](int64_t i, auto n) {
    vf v = load(x + i, n);
    if (residual) {
      v += load(residual + i, n);
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
    if (residual) store(new_residual + k, v, n);
    vf y = v * scale;
    if constexpr (!std::is_same_v<W, NoWeight>) {
      if (p.cast_first) y = round_to<X>(y);
      y *= load(weight + k, n) + p.weight_offset;
    }
    store(out + k, y, n);
  });
}

template <class X, class W>
void norm(const Problem& p) {
  const int64_t bytes = p.rows * p.width * sizeof(X);
  expect_output(p.out, bytes);
  if (p.residual) expect_output(p.new_residual, bytes);
  const int64_t streams = p.residual ? 4 : 2;
  parallel_for(p.rows, p.width * streams * sizeof(X), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row<X, W>(p, row);
  });
}

}  // namespace
}  // namespace opmux

// x, x_stride, residual or null, residual_stride, weight or null, out, new_residual, rows, width, variance_size, dtype,
// weight_is_fp32, eps, weight_offset, cast_first, round_sum -> 0.
//
// out = x / sqrt(mean(x[:variance_size]^2) + eps) * (weight + weight_offset), in fp32. With cast_first the normalised value
// is rounded to storage before the product. With a residual, x is x + residual, kept in fp32 or (round_sum) rounded first,
// and its rounded value goes to new_residual. The weight has x's dtype, or fp32; outputs are contiguous.
OPMUX_EXPORT int64_t opmux_rms_norm(const Arg* a) {
  using namespace opmux;
  Reader in(a);
  Problem p{};
  p.x = in.ptr<void>();
  p.x_stride = in.i();
  p.residual = in.ptr<void>();
  p.residual_stride = in.i();
  p.weight = in.ptr<void>();
  p.out = in.ptr<void>();
  p.new_residual = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  p.variance_size = in.i();
  const int64_t dtype = in.i();
  const bool weight_is_fp32 = in.i();
  p.eps = in.f();
  p.weight_offset = in.f();
  p.cast_first = in.i();
  p.round_sum = in.i();
  with_dtype(dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    if (!p.weight) norm<X, NoWeight>(p);
    else if (weight_is_fp32) norm<X, float>(p);
    else norm<X, X>(p);
  });
  return 0;
}
