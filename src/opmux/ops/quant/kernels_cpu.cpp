// flags: -O2 -ffp-contract=off -fno-associative-math
// Quantization to fp8, alone and behind a norm or a gate. Without contraction and reassociation, so that fused kernels
// return what their parts return.
#include <atomic>
#include <type_traits>

#include "../norm/rms_norm_row.h"
#include "abi.h"
#include "memory.h"
#include "quantize.h"
#include "scratch.h"
#include "threads.h"
#include "vec.h"
#include "vec_math.h"

namespace opmux {
namespace {

struct Rows {
  const void* x;
  int64_t stride, rows;

  template <class X>
  const X* row(int64_t k) const { return static_cast<const X*>(x) + k * stride; }
};

Rows read_rows(Reader& in) {
  Rows r{};
  r.x = in.ptr<void>();
  r.stride = in.i();
  r.rows = in.i();
  return r;
}

// Calls body with a null pointer of the storage type and one of the format.
template <class Body>
void with_types(int64_t dtype, int64_t format, const Body& body) {
  with_dtype(dtype, [&](auto* x) { with_format(format, [&](auto* f) { body(x, f); }); });
}

template <class X>
float largest_of_all(const Rows& r, int64_t width) {
  std::atomic<uint32_t> most{0};  // magnitudes order as their bits do
  parallel_pieces(r.rows, width, sizeof(X), [&](int64_t row, int64_t first, int64_t columns) {
    const uint32_t bits = bits_of(largest(r.row<X>(row) + first, columns));
    uint32_t seen = most.load(std::memory_order_relaxed);
    while (bits > seen && !most.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {}
  });
  return float_of(most.load());
}

// Calls prepare(row) for each row, which returns its elements, and quantizes them. `bytes` is what preparing one touches.
template <class X, class F, class Prepare>
void quantize_rows(const Quantization& q, int64_t rows, int64_t bytes, const Prepare& prepare) {
  expect_output(q.out, rows * q.width);
  parallel_for(rows, bytes + q.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row<F, X>(q, row, prepare(row));
  });
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// x, x_stride, rows, dtype, format, per_tensor, and the arguments of read_quantization -> 0.
//
// With per_tensor there is one scale, of all rows.
OPMUX_EXPORT int64_t opmux_quant_fp8(const Arg* a) {
  Reader in(a);
  const Rows r = read_rows(in);
  const int64_t dtype = in.i();
  const int64_t format = in.i();
  const bool per_tensor = in.i();
  Quantization q = read_quantization(in);
  with_types(dtype, format, [&](auto* x, auto* f) {
    using X = std::remove_pointer_t<decltype(x)>;
    using F = std::remove_pointer_t<decltype(f)>;
    if (per_tensor) {
      *q.scales = dynamic_scale<F>(q, largest_of_all<X>(r, q.width));
      q.given = q.scales;
    }
    quantize_rows<X, F>(q, r.rows, q.width * sizeof(X), [&](int64_t row) { return r.row<X>(row); });
  });
  return 0;
}

// x, x_stride, rows, dtype, format, round_gate, and the arguments of read_quantization -> 0.
//
// Quantizes silu(x[:, :width]) * x[:, width:], rounded to x's dtype before; with round_gate the silu is rounded too.
OPMUX_EXPORT int64_t opmux_silu_and_mul_quant_fp8(const Arg* a) {
  Reader in(a);
  const Rows r = read_rows(in);
  const int64_t dtype = in.i();
  const int64_t format = in.i();
  const bool round_gate = in.i();
  const Quantization q = read_quantization(in);
  with_types(dtype, format, [&](auto* x, auto* f) {
    using X = std::remove_pointer_t<decltype(x)>;
    // The exponential takes about as long as moving four bytes.
    quantize_rows<X, std::remove_pointer_t<decltype(f)>>(q, r.rows, q.width * (2 * sizeof(X) + 4), [&](int64_t row) {
      const X* gate = r.row<X>(row);
      X* product = scratch<X>(q.width);
      for_lanes(q.width, [&](int64_t i, auto n) {
        const vf v = load(gate + i, n);
        vf activated = v / (1.0f + exp(-v));
        if (round_gate) activated = round_to<X>(activated);
        store(product + i, activated * load(gate + q.width + i, n), n);
      });
      return product;
    });
  });
  return 0;
}

// new_residual or null, rows, dtype, format, the arguments of read_rms_norm, those of read_quantization -> 0.
//
// Quantizes the norm, rounded to x's dtype before.
OPMUX_EXPORT int64_t opmux_rms_norm_quant_fp8(const Arg* a) {
  Reader in(a);
  void* new_residual = in.ptr<void>();
  const int64_t rows = in.i();
  const int64_t dtype = in.i();
  const int64_t format = in.i();
  RmsNorm p = read_rms_norm(in);
  p.new_residual = new_residual;
  const Quantization q = read_quantization(in);
  with_types(dtype, format, [&](auto* x, auto* f) {
    using X = std::remove_pointer_t<decltype(x)>;
    const int64_t bytes = q.width * sizeof(X);
    if (p.residual) expect_output(new_residual, rows * bytes);
    with_weight<X>(p, [&](auto* weight) {
      using W = std::remove_pointer_t<decltype(weight)>;
      quantize_rows<X, std::remove_pointer_t<decltype(f)>>(q, rows, bytes * (p.residual ? 3 : 1), [&](int64_t row) {
        X* normed = scratch<X>(q.width);
        rms_norm_row<X, W>(p, row, normed);
        return normed;
      });
    });
  });
  return 0;
}
