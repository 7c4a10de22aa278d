// flags: -O2 -ffp-contract=off -fno-associative-math
// Activations. Each is a functor on fp32 vectors; the loops below serve all of them.
#include <cmath>
#include <type_traits>

#include "abi.h"
#include "memory.h"
#include "threads.h"
#include "vec.h"
#include "vec_math.h"

namespace opmux {
namespace {

struct Silu {
  vf operator()(vf x) const { return x / (1.0f + exp(-x)); }
};
struct QuickGelu {
  vf operator()(vf x) const { return x / (1.0f + exp(x * -1.702f)); }
};
struct Gelu {
  vf operator()(vf x) const { return x * normal_cdf(x); }
};
struct GeluTanh {
  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u), without the cancellation of the left side for u << 0.
  vf operator()(vf x) const {
    const vf u = x * 0.7978845608f * (1.0f + 0.044715f * (x * x));
    return x / (1.0f + exp(-2.0f * u));
  }
};
// The comparisons of the next three are false for NaN, which therefore stays.
struct FatRelu {
  float threshold;
  vf operator()(vf x) const { return x <= threshold ? vf{} : x; }
};
struct Relu2 {
  vf operator()(vf x) const {
    const vf positive = x < 0.0f ? vf{} : x;
    return positive * positive;
  }
};
struct XIelu {
  float alpha_p, alpha_n, beta, eps;
  vf operator()(vf x) const {
    const vf bounded = x > eps ? splat(eps) : x;
    const vf negative = (expm1(bounded) - x) * alpha_n;
    return (x > 0.0f ? alpha_p * x * x : negative) + beta * x;
  }
};

// Computing one element takes about as long as moving this many bytes.
constexpr int64_t kComputeBytes = 4;

struct Gated {
  const void* gate;
  const void* up;
  void* out;
  int64_t gate_stride, up_stride, rows, width;
  bool round_gate;
};

template <class T, class Activation>
void gated(const Gated& p, const Activation& activation) {
  expect_output(p.out, p.rows * p.width * sizeof(T));
  parallel_pieces(p.rows, p.width, 3 * sizeof(T) + kComputeBytes, [&](int64_t row, int64_t first, int64_t columns) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + first;
    const T* up = static_cast<const T*>(p.up) + row * p.up_stride + first;
    T* out = static_cast<T*>(p.out) + row * p.width + first;
    for_lanes(columns, [&](int64_t i, auto n) {
      vf activated = activation(load(gate + i, n));
      if (p.round_gate) activated = round_to<T>(activated);
      store(out + i, activated * load(up + i, n), n);
    });
  });
}

struct Rows {
  const void* x;
  void* out;
  int64_t stride, rows, width;
};

template <class T, class Activation>
void elementwise(const Rows& p, const Activation& activation) {
  expect_output(p.out, p.rows * p.width * sizeof(T));
  parallel_pieces(p.rows, p.width, 2 * sizeof(T) + kComputeBytes, [&](int64_t row, int64_t first, int64_t columns) {
    const T* x = static_cast<const T*>(p.x) + row * p.stride + first;
    T* out = static_cast<T*>(p.out) + row * p.width + first;
    for_lanes(columns, [&](int64_t i, auto n) { store(out + i, activation(load(x + i, n)), n); });
  });
}

// gelu(relu(gate - cutoff)) * up with cutoff = mean + multiplier * population deviation of the gate's row.
template <class T, class Activation>
void sparse_row(const T* gate, const T* up, T* out, int64_t width, float multiplier, const Activation& activation) {
  vf total = {};
  for_lanes(width, [&](int64_t i, auto n) { total += load(gate + i, n); });
  const float mean = sum(total) / static_cast<float>(width);
  vf squares = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const vf centred = load(gate + i) - mean;
    squares += centred * centred;
  }
  float rest = 0.0f;
  if (i < width) {
    const vf centred = load(gate + i, Part{static_cast<int>(width - i)}) - mean;
    for (int k = 0; k < width - i; ++k) rest += centred[k] * centred[k];
  }
  const float cutoff = mean + multiplier * std::sqrt((sum(squares) + rest) / static_cast<float>(width));
  for_lanes(width, [&](int64_t k, auto n) {
    const vf above = load(gate + k, n) - cutoff;
    store(out + k, activation(above < 0.0f ? vf{} : above) * load(up + k, n), n);
  });
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// gate, gate_stride, up, up_stride, out, rows, width, dtype, kind, threshold, round_gate -> 0.
//
// out = activation(gate) * up in fp32, rounded once, or (round_gate) after the activation too. out is contiguous.
// kind: 0 silu, 1 gelu, 2 gelu by tanh, 3 fatrelu (with the threshold).
OPMUX_EXPORT int64_t opmux_gated_activation(const Arg* a) {
  Reader in(a);
  Gated p{};
  p.gate = in.ptr<void>();
  p.gate_stride = in.i();
  p.up = in.ptr<void>();
  p.up_stride = in.i();
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  const int64_t dtype = in.i();
  const int64_t kind = in.i();
  const float threshold = in.f();
  p.round_gate = in.i();
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (kind == 0) gated<T>(p, Silu{});
    else if (kind == 1) gated<T>(p, Gelu{});
    else if (kind == 2) gated<T>(p, GeluTanh{});
    else gated<T>(p, FatRelu{threshold});
  });
  return 0;
}

// x, x_stride, out, rows, width, dtype, kind, four parameters of xielu (alpha_p, alpha_n, beta, eps) -> 0.
//
// out = activation(x), contiguous. kind: 0 gelu by tanh, 1 quick_gelu, 2 relu2, 3 xielu, 4 gelu.
OPMUX_EXPORT int64_t opmux_activation(const Arg* a) {
  Reader in(a);
  Rows p{};
  p.x = in.ptr<void>();
  p.stride = in.i();
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  const int64_t dtype = in.i();
  const int64_t kind = in.i();
  XIelu xielu{};
  xielu.alpha_p = in.f();
  xielu.alpha_n = in.f();
  xielu.beta = in.f();
  xielu.eps = in.f();
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (kind == 0) elementwise<T>(p, GeluTanh{});
    else if (kind == 1) elementwise<T>(p, QuickGelu{});
    else if (kind == 2) elementwise<T>(p, Relu2{});
    else if (kind == 4) elementwise<T>(p, Gelu{});
    else elementwise<T>(p, xielu);
  });
  return 0;
}

// x, x_stride, out, rows, width of out, dtype, alpha, limit -> 0.
//
// Pairs (gate, up) lie side by side in x: out = (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit).
OPMUX_EXPORT int64_t opmux_swigluoai_and_mul(const Arg* a) {
  Reader in(a);
  Rows p{};
  p.x = in.ptr<void>();
  p.stride = in.i();
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  const int64_t dtype = in.i();
  const float alpha = in.f();
  const float limit = in.f();
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_pieces(p.rows, p.width, 3 * sizeof(T) + kComputeBytes, [&](int64_t row, int64_t first, int64_t columns) {
      const T* x = static_cast<const T*>(p.x) + row * p.stride + 2 * first;
      T* out = static_cast<T*>(p.out) + row * p.width + first;
      for_lanes(columns, [&](int64_t i, auto n) {
        const Pairs v = load_pairs(x + 2 * i, n);
        const vf gate = v.even > limit ? splat(limit) : v.even;
        vf up = v.odd > limit ? splat(limit) : v.odd;
        up = up < -limit ? splat(-limit) : up;
        store(out + i, (up + 1.0f) * (gate / (1.0f + exp(gate * -alpha))), n);
      });
    });
  });
  return 0;
}

// gate, gate_stride, up, up_stride, out, rows, width, dtype, multiplier, by_tanh -> 0. See sparse_row.
OPMUX_EXPORT int64_t opmux_gelu_and_mul_sparse(const Arg* a) {
  Reader in(a);
  Gated p{};
  p.gate = in.ptr<void>();
  p.gate_stride = in.i();
  p.up = in.ptr<void>();
  p.up_stride = in.i();
  p.out = in.ptr<void>();
  p.rows = in.i();
  p.width = in.i();
  const int64_t dtype = in.i();
  const float multiplier = in.f();
  const bool by_tanh = in.i();
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.rows, p.width * (3 * sizeof(T) + kComputeBytes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
        const T* up = static_cast<const T*>(p.up) + row * p.up_stride;
        T* out = static_cast<T*>(p.out) + row * p.width;
        if (by_tanh) sparse_row(gate, up, out, p.width, multiplier, GeluTanh{});
        else sparse_row(gate, up, out, p.width, multiplier, Gelu{});
      }
    });
  });
  return 0;
}
