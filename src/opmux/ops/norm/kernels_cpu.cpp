// flags: -O2 -ffp-contract=off -fno-associative-math
// Norms. Without contraction and reassociation, so that each rounding is where PyTorch's own body has it.
#include <cmath>
#include <type_traits>

#include "abi.h"
#include "memory.h"
#include "rms_norm_row.h"
#include "scratch.h"
#include "threads.h"
#include "vec.h"
#include "vec_math.h"

namespace opmux {
namespace {

template <class X, class W>
void rms_norm(const RmsNorm& p, X* out, int64_t rows) {
  const int64_t bytes = rows * p.width * sizeof(X);
  expect_output(out, bytes);
  if (p.residual) expect_output(p.new_residual, bytes);
  const int64_t streams = p.residual ? 4 : 2;
  parallel_for(rows, p.width * streams * sizeof(X), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row<X, W>(p, row, out + row * p.width);
  });
}

// A tensor of x's dtype X or of fp32.
struct Either {
  const void* p;
  bool is_fp32;

  template <class X, class N>
  vf load(int64_t i, N n) const {
    return is_fp32 ? opmux::load(static_cast<const float*>(p) + i, n) : opmux::load(static_cast<const X*>(p) + i, n);
  }
};

Either read_either(Reader& in) {
  const void* p = in.ptr<void>();
  return {p, in.i() != 0};
}

// v in the lanes of the row, zero beyond.
vf in_row(vf v, Full) { return v; }
vf in_row(vf v, Part part) { return detail::lanes([](int k) { return k; }) < part.n ? v : vf{}; }

// The sum of value(i, n) over a row. Two accumulators: an addition takes longer than loading what it adds.
template <class Value>
float sum_of(int64_t width, const Value& value) {
  vf even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    even += value(i, Full{});
    odd += value(i + kLanes, Full{});
  }
  for_lanes(width - i, [&](int64_t k, auto n) { even += value(i + k, n); });
  return sum(even + odd);
}

struct Gated {
  const void* x;
  Either z;  // a null pointer: no gate
  Either weight;
  void* out;
  int64_t x_stride, z_stride, rows, width, group;
  float eps;
  bool norm_before_gate, by_sigmoid;
};

template <class X>
void gated_row(const Gated& p, int64_t row) {
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  X* out = static_cast<X*>(p.out) + row * p.width;
  const auto gate = [&](int64_t i, auto n) {
    const vf z = p.z.load<X>(row * p.z_stride + i, n);
    return p.by_sigmoid ? sigmoid(z) : z * sigmoid(z);
  };
  const bool gate_first = p.z.p && !p.norm_before_gate, gate_last = p.z.p && p.norm_before_gate;
  // What is normalised, kept in fp32: a gate costs more to compute than to read again.
  float* values = scratch<float>(p.group);
  for (int64_t first = 0; first < p.width; first += p.group) {
    const float squares = sum_of(p.group, [&](int64_t k, auto n) {
      vf v = load(x + first + k, n);
      if (gate_first) v = v * gate(first + k, n);
      store(values + k, v, n);
      return v * v;
    });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(p.group) + p.eps);
    for_lanes(p.group, [&](int64_t k, auto n) {
      const int64_t i = first + k;
      vf y = load(values + k, n) * scale * p.weight.load<X>(i, n);
      if (gate_last) y = y * gate(i, n);
      store(out + i, y, n);
    });
  }
}

struct LayerNorm {
  const void *x, *residual;  // the second or null
  Either weight, bias;       // or null pointers
  void *out, *new_residual;
  int64_t x_stride, residual_stride, rows, width;
  float eps, weight_offset;
  bool round_sum;
};

// Adds: a residual is added to x, and the sum, rounded, written; the norm reads it unrounded unless round_sum.
template <class X, bool Adds>
void layer_norm_row(const LayerNorm& p, int64_t row) {
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  const X* residual = Adds ? static_cast<const X*>(p.residual) + row * p.residual_stride : nullptr;
  X* out = static_cast<X*>(p.out) + row * p.width;
  const auto sum_at = [&](int64_t i, auto n) {
    vf v = load(x + i, n);
    if constexpr (Adds) v = v + load(residual + i, n);
    return v;
  };
  if constexpr (Adds) {
    X* total = static_cast<X*>(p.new_residual) + row * p.width;
    for_lanes(p.width, [&](int64_t i, auto n) { store(total + i, sum_at(i, n), n); });
    if (p.round_sum) {
      LayerNorm rounded = p;
      rounded.x = p.new_residual;
      rounded.x_stride = p.width;
      return layer_norm_row<X, false>(rounded, row);
    }
  }
  const float size = static_cast<float>(p.width);
  const float mean = sum_of(p.width, sum_at) / size;
  const float variance = sum_of(p.width, [&](int64_t i, auto n) {
    const vf centred = in_row(sum_at(i, n) - mean, n);
    return centred * centred;
  }) / size;
  const float scale = 1.0f / std::sqrt(variance + p.eps);
  for_lanes(p.width, [&](int64_t i, auto n) {
    vf y = (sum_at(i, n) - mean) * scale;
    if (p.weight.p) y = y * (p.weight.load<X>(i, n) + p.weight_offset);
    if (p.bias.p) y = y + p.bias.load<X>(i, n);
    store(out + i, y, n);
  });
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// out, new_residual or null, rows, dtype, and the arguments of read_rms_norm -> 0. Outputs are contiguous.
OPMUX_EXPORT int64_t opmux_rms_norm(const Arg* a) {
  Reader in(a);
  void* out = in.ptr<void>();
  void* new_residual = in.ptr<void>();
  const int64_t rows = in.i();
  const int64_t dtype = in.i();
  RmsNorm p = read_rms_norm(in);
  p.new_residual = new_residual;
  with_dtype(dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    with_weight<X>(p, [&](auto* weight) {
      rms_norm<X, std::remove_pointer_t<decltype(weight)>>(p, static_cast<X*>(out), rows);
    });
  });
  return 0;
}

// out, tokens, heads, token_stride, dtype, and the arguments of read_rms_norm without a residual -> 0.
//
// The norm of every head of every token: heads lie x_stride apart, tokens token_stride. out is contiguous.
OPMUX_EXPORT int64_t opmux_rms_norm_heads(const Arg* a) {
  Reader in(a);
  void* out = in.ptr<void>();
  const int64_t tokens = in.i();
  const int64_t heads = in.i();
  const int64_t token_stride = in.i();
  const int64_t dtype = in.i();
  const RmsNorm p = read_rms_norm(in);
  with_dtype(dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    const int64_t bytes = heads * p.width * sizeof(X);
    expect_output(out, tokens * bytes);
    with_weight<X>(p, [&](auto* weight) {
      parallel_for(tokens, 2 * bytes, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          RmsNorm at = p;
          at.x = static_cast<const X*>(p.x) + token * token_stride;
          X* to = static_cast<X*>(out) + token * heads * p.width;
          for (int64_t head = 0; head < heads; ++head) {
            rms_norm_row<X, std::remove_pointer_t<decltype(weight)>>(at, head, to + head * p.width);
          }
        }
      });
    });
  });
  return 0;
}

// x, x_stride, z or null, z_is_fp32, z_stride, weight, weight_is_fp32, out, rows, width, group, dtype, eps,
// norm_before_gate, by_sigmoid -> 0.
//
// Groups of `group` neighbours are normalised on their own: norm(x) * weight * act(z) with norm_before_gate, otherwise
// norm(x * act(z)) * weight; act is silu or (by_sigmoid) the sigmoid. fp32, rounded once; out is contiguous.
OPMUX_EXPORT int64_t opmux_rms_norm_gated(const Arg* a) {
  Reader in(a);
  Gated p{};
  p.x = in.ptr<void>();
  p.x_stride = in.i();
  p.z = read_either(in);
  p.z_stride = in.i();
  p.weight = read_either(in);
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  p.group = in.i();
  const int64_t dtype = in.i();
  p.eps = in.f();
  p.norm_before_gate = in.i();
  p.by_sigmoid = in.i();
  with_dtype(dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    expect_output(p.out, p.rows * p.width * sizeof(X));
    // A gate's exponential takes about as long as moving four bytes.
    parallel_for(p.rows, p.width * (3 * sizeof(X) + 4), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) gated_row<X>(p, row);
    });
  });
  return 0;
}

// x, x_stride, weight or null, weight_is_fp32, bias or null, bias_is_fp32, out, rows, width, dtype, eps, weight_offset,
// residual or null, residual_stride, new_residual or null, round_sum -> 0.
//
// out = (s - mean) / sqrt(variance + eps) * (weight + weight_offset) + bias in fp32, rounded once; s is x, or x + residual,
// which is written, too. Outputs are contiguous.
OPMUX_EXPORT int64_t opmux_layer_norm(const Arg* a) {
  Reader in(a);
  LayerNorm p{};
  p.x = in.ptr<void>();
  p.x_stride = in.i();
  p.weight = read_either(in);
  p.bias = read_either(in);
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  const int64_t dtype = in.i();
  p.eps = in.f();
  p.weight_offset = in.f();
  p.residual = in.ptr<void>();
  p.residual_stride = in.i();
  p.new_residual = in.ptr<void>();
  p.round_sum = in.i() != 0;
  const int64_t streams = p.residual ? 4 : 2;
  with_dtype(dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    expect_output(p.out, p.rows * p.width * sizeof(X));
    if (p.residual) expect_output(p.new_residual, p.rows * p.width * sizeof(X));
    parallel_for(p.rows, p.width * streams * sizeof(X), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (p.residual) layer_norm_row<X, true>(p, row);
        else layer_norm_row<X, false>(p, row);
      }
    });
  });
  return 0;
}
