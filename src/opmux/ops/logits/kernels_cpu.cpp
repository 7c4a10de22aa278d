// flags: -ffp-contract=off -fno-associative-math
// Soft cap and scale of logits.
#include <type_traits>

#include "abi.h"
#include "threads.h"
#include "vec.h"
#include "vec_math.h"

using namespace opmux;

// x, x_stride, out, rows, width, dtype, soft_cap (0: none), scale -> 0.
//
// out = cap * tanh(x / cap) * scale in fp32, rounded once, contiguous.
OPMUX_EXPORT int64_t opmux_cap_and_scale(const Arg* a) {
  constexpr int64_t kComputeBytes = 8;  // a tanh takes about as long as moving this many bytes
  Reader in(a);
  const void* first = in.ptr<void>();
  const int64_t stride = in.i();
  void* result = in.ptr<void>();
  const int64_t rows = in.i();
  const int64_t width = in.i();
  const int64_t dtype = in.i();
  const float cap = in.f();
  const float scale = in.f();
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_pieces(rows, width, 2 * sizeof(T) + kComputeBytes, [&](int64_t row, int64_t begin, int64_t columns) {
      const T* x = static_cast<const T*>(first) + row * stride + begin;
      T* out = static_cast<T*>(result) + row * width + begin;
      if (cap == 0.0f) {
        for_lanes(columns, [&](int64_t i, auto n) { store(out + i, load(x + i, n) * scale, n); });
      } else {
        for_lanes(columns, [&](int64_t i, auto n) { store(out + i, cap * tanh(load(x + i, n) / cap) * scale, n); });
      }
    });
  });
  return 0;
}
