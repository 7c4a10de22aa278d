// The convolution, the scans and the gated norm of state-space mixers. States are fp32 while a call computes with them.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "requests.h"
#include "scratch.h"
#include "threads.h"
#include "vec.h"
#include "vec_math.h"

namespace opmux {
namespace {

// log(1 + e^x): x above the point where the sum's second term is lost.
vf softplus(vf x) {
  const vf u = exp(x < 0.0f ? x : -x);
  // log(1 + u) for u in [0, 1] (polynomial of the Cephes library, around 1 or around 2).
  const vi large = u > 0.41421356f;
  const vf f = large ? fma(u, splat(0.5f), splat(-0.5f)) : u;
  const vf z = f * f;
  vf p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  const vf log1p = fma(splat(-0.5f), z, fma(p * z, f, f)) + (large ? splat(0.69314718f) : splat(0.0f));
  const vf y = (x > 0.0f ? x : splat(0.0f)) + log1p;
  return x == x ? y : x;
}

// A row of any of the three dtypes, by a test at each load.
struct Any {
  const void* p;
  int64_t dtype;

  template <class N>
  vf load(int64_t i, N n) const {
    if (dtype == F32) return opmux::load(static_cast<const float*>(p) + i, n);
    if (dtype == BF16) return opmux::load(static_cast<const bf16*>(p) + i, n);
    return opmux::load(static_cast<const f16*>(p) + i, n);
  }
  float at(int64_t i) const { return load(i, Part{1})[0]; }
};

struct AnyOut {
  void* p;
  int64_t dtype;

  template <class N>
  void store(int64_t i, vf v, N n) const {
    if (dtype == F32) opmux::store(static_cast<float*>(p) + i, v, n);
    else if (dtype == BF16) opmux::store(static_cast<bf16*>(p) + i, v, n);
    else opmux::store(static_cast<f16*>(p) + i, v, n);
  }
};

Any read_any(Reader& in) {
  const void* p = in.ptr<void>();
  return {p, in.i()};
}

int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

void zero_rows_of_nobody(const Requests& q, void* out, int64_t row_bytes) {
  for_rows_of_nobody(q, [&](int64_t row) { std::memset(static_cast<char*>(out) + row * row_bytes, 0, row_bytes); });
}

// ---- Convolution ----

struct Conv {
  const void* x;
  void* out;
  int64_t x_stride, width, taps;
  Any weight, bias;  // [width, taps] dense; bias or null
  void* state;       // [slots, >= taps - 1, width], any strides, or null
  int64_t state_dtype, slot_stride, row_stride, column_stride, state_rows;
  bool silu;
};

constexpr int64_t kConvTokens = 64, kConvColumns = 512;

float state_at(const Conv& p, int64_t slot, int64_t row, int64_t column) {
  const int64_t at = slot * p.slot_stride + row * p.row_stride + column * p.column_stride;
  return Any{p.state, p.state_dtype}.at(at);
}

// Columns [first, first + count) of rows [begin, end) of a request whose rows start at `start`, behind window
// [taps - 1, width].
template <class X>
void conv_piece(const Conv& p, int64_t start, int64_t begin, int64_t end, const float* window, int64_t first, int64_t count) {
  const int64_t back = p.taps - 1;
  float* weight = scratch<float>(p.taps * count);
  for (int64_t j = 0; j < p.taps; ++j) {
    for (int64_t i = 0; i < count; ++i) weight[j * count + i] = p.weight.at((first + i) * p.taps + j);
  }
  const X* x = static_cast<const X*>(p.x) + first;
  X* out = static_cast<X*>(p.out) + first;
  for (int64_t t = begin; t < end; ++t) {
    for_lanes(count, [&](int64_t i, auto n) {
      vf y = p.bias.p ? p.bias.load(first + i, n) : splat(0.0f);
      for (int64_t j = 0; j < p.taps; ++j) {
        const int64_t row = t - back + j;
        const vf v = row >= start ? load(x + row * p.x_stride + i, n) : load(window + (row - start + back) * p.width + first + i, n);
        y = fma(v, load(weight + j * count + i, n), y);
      }
      if (p.silu) y = y * sigmoid(y);
      store(out + t * p.width + i, y, n);
    });
  }
}

// What request r leaves in its slot: the last inputs, as many as requests.py says.
template <class X>
void keep_window(const Conv& p, const Requests& q, int64_t r, const float* window) {
  const int64_t start = q.start(r), n = q.end(r) - start, back = p.taps - 1;
  if (n == 0 && q.has_state(r)) return;
  int64_t keep = back;
  if (q.accepted && back - 1 + n <= p.state_rows) keep = std::max(keep, back - 1 + n);
  const int64_t slot = q.slot(r, 0);
  for (int64_t k = 0; k < keep; ++k) {
    const int64_t row = n - keep + k;  // of the request; below zero of the window
    const auto value = [&](int64_t i, auto lanes) {
      return row >= 0 ? load(static_cast<const X*>(p.x) + (start + row) * p.x_stride + i, lanes)
                      : load(window + (row + back) * p.width + i, lanes);
    };
    const int64_t at = slot * p.slot_stride + k * p.row_stride;
    const AnyOut state{p.state, p.state_dtype};
    if (p.column_stride == 1) {
      for_lanes(p.width, [&](int64_t i, auto lanes) { state.store(at + i, value(i, lanes), lanes); });
    } else {
      for (int64_t i = 0; i < p.width; ++i) state.store(at + i * p.column_stride, value(i, Part{1}), Part{1});
    }
  }
}

template <class X>
void conv(const Conv& p, const Requests& q) {
  const int64_t back = p.taps - 1;
  expect_output(p.out, q.tokens * p.width * sizeof(X));
  zero_rows_of_nobody(q, p.out, p.width * sizeof(X));
  // The windows are copied before any slot is written: pieces of one request may run in any order.
  std::vector<float> windows(q.count * back * p.width);
  std::vector<int64_t> pieces(q.count + 1);
  for (int64_t r = 0; r < q.count; ++r) {
    const int64_t n = q.padding(r) ? 0 : q.end(r) - q.start(r);
    pieces[r + 1] = pieces[r] + (n + kConvTokens - 1) / kConvTokens;
  }
  const int64_t columns = (p.width + kConvColumns - 1) / kConvColumns;
  parallel_for(q.count, back * p.width * 8, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      if (q.padding(r) || !q.has_state(r)) continue;
      const int64_t slot = q.slot(r, 0), offset = q.offset(r);
      for (int64_t k = 0; k < back; ++k) {
        float* to = &windows[(r * back + k) * p.width];
        const int64_t from = std::min(offset + k, p.state_rows - 1);
        if (p.column_stride == 1) {
          const Any state{p.state, p.state_dtype};
          const int64_t at = slot * p.slot_stride + from * p.row_stride;
          for_lanes(p.width, [&](int64_t i, auto n) { store(to + i, state.load(at + i, n), n); });
        } else {
          for (int64_t i = 0; i < p.width; ++i) to[i] = state_at(p, slot, from, i);
        }
      }
    }
  });
  const int64_t total = pieces[q.count] * columns;
  const int64_t tokens = std::min<int64_t>(kConvTokens, q.tokens);
  parallel_for(total, tokens * std::min(p.width, kConvColumns) * (2 * sizeof(X) + 4), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t piece = k / columns, first = k % columns * kConvColumns;
      const int64_t r = std::upper_bound(pieces.begin(), pieces.end(), piece) - pieces.begin() - 1;
      const int64_t start = q.start(r), row = start + (piece - pieces[r]) * kConvTokens;
      conv_piece<X>(p, start, row, std::min(row + kConvTokens, q.end(r)), windows.data() + r * back * p.width, first,
                    std::min(kConvColumns, p.width - first));
    }
  });
  if (!p.state) return;
  for (int64_t r = 0; r < q.count; ++r) {
    if (!q.padding(r)) keep_window<X>(p, q, r, windows.data() + r * back * p.width);
  }
}

// ---- Selective scan ----

struct Selective {
  Any x, dt, z;  // [tokens, width]; z or null
  int64_t x_stride, dt_stride, z_stride;
  const float *A, *B, *C, *D, *dt_bias;  // [width, states], [tokens, states] twice, [width] or null twice; dense
  AnyOut out;
  AnyOut state;  // [slots, width, states], dense but for the slots, or null
  int64_t slot_stride, width, states;
};

// Channels [first, first + lanes) of request r. Lanes are channels, so that nothing is summed across them.
void selective_piece(const Selective& p, const Requests& q, int64_t r, int64_t first) {
  const int count = static_cast<int>(std::min<int64_t>(kLanes, p.width - first));
  const Part n{count};
  float* a = scratch<float>(2 * p.states * kLanes);
  float* h = a + p.states * kLanes;
  std::memset(a, 0, 2 * p.states * kLanes * sizeof(float));
  const int64_t from = q.first_slot(r);
  const Any state{p.state.p, p.state.dtype};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t s = 0; s < p.states; ++s) a[s * kLanes + i] = p.A[(first + i) * p.states + s];
    if (from >= 0) {
      const int64_t at = from * p.slot_stride + (first + i) * p.states;
      float row[kLanes];
      for_lanes(p.states, [&](int64_t s, auto lanes) {
        store(row, state.load(at + s, lanes));
        for (int64_t k = 0; k < std::min<int64_t>(kLanes, p.states - s); ++k) h[(s + k) * kLanes + i] = row[k];
      });
    }
  }
  const auto keep = [&](int64_t to) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = to * p.slot_stride + (first + i) * p.states;
      float row[kLanes];
      for_lanes(p.states, [&](int64_t s, auto lanes) {
        for (int64_t k = 0; k < std::min<int64_t>(kLanes, p.states - s); ++k) row[k] = h[(s + k) * kLanes + i];
        p.state.store(at + s, load(row, lanes), lanes);
      });
    }
  };
  const vf skip = p.D ? load(p.D + first, n) : splat(0.0f);
  const vf bias = p.dt_bias ? load(p.dt_bias + first, n) : splat(0.0f);
  const int64_t start = q.start(r), end = q.end(r);
  for (int64_t t = start; t < end; ++t) {
    const vf x = p.x.load(t * p.x_stride + first, n);
    const vf dt = softplus(p.dt.load(t * p.dt_stride + first, n) + bias);
    const vf dx = dt * x;
    const float *b = p.B + t * p.states, *c = p.C + t * p.states;
    vf even = x * skip, odd = splat(0.0f);
    int64_t s = 0;
    for (; s + 2 <= p.states; s += 2) {
      const vf h0 = fma(exp(dt * load(a + s * kLanes)), load(h + s * kLanes), dx * b[s]);
      const vf h1 = fma(exp(dt * load(a + (s + 1) * kLanes)), load(h + (s + 1) * kLanes), dx * b[s + 1]);
      store(h + s * kLanes, h0);
      store(h + (s + 1) * kLanes, h1);
      even = fma(h0, splat(c[s]), even);
      odd = fma(h1, splat(c[s + 1]), odd);
    }
    if (s < p.states) {
      const vf h0 = fma(exp(dt * load(a + s * kLanes)), load(h + s * kLanes), dx * b[s]);
      store(h + s * kLanes, h0);
      even = fma(h0, splat(c[s]), even);
    }
    vf y = even + odd;
    if (p.z.p) {
      const vf z = p.z.load(t * p.z_stride + first, n);
      y = y * (z * sigmoid(z));
    }
    p.out.store(t * p.width + first, y, n);
    const int64_t to = q.slot_after(r, t - start);
    if (to >= 0) keep(to);
  }
  if (start == end && q.slot_after(r, -1) >= 0) keep(q.slot_after(r, -1));
}

// ---- SSD scan ----

struct Ssd {
  Any x, dt;  // [tokens, heads, size] with dense heads and sizes; [tokens, heads]
  int64_t x_stride, dt_stride;
  const float *A, *B, *C, *D, *dt_bias;  // [heads]; [tokens, groups, states] twice; [heads] or null twice; dense
  AnyOut out;
  AnyOut state;  // [slots, heads, size, states], dense but for the slots, or null
  int64_t slot_stride, heads, size, groups, states;
  float least, most;
};

constexpr int kSsdTokens = 4;

// NT tokens of one row of a head's state, in one pass over it: it is read and written once for all of them.
template <int NT>
void ssd_row(float* h, int64_t vectors, const float* b, const float* c, int64_t stride, const float* decay, const float* dx,
             float* y) {
  vf acc[NT] = {};
  for (int64_t v = 0; v < vectors; ++v) {
    vf value = load(h + v * kLanes);
    for (int k = 0; k < NT; ++k) {
      value = fma(splat(decay[k]), value, dx[k] * load(b + k * stride + v * kLanes));
      acc[k] = fma(value, load(c + k * stride + v * kLanes), acc[k]);
    }
    store(h + v * kLanes, value);
  }
  for (int k = 0; k < NT; ++k) y[k] = sum(acc[k]);
}

void ssd_piece(const Ssd& p, const Requests& q, int64_t r, int64_t head) {
  const int64_t vectors = (p.states + kLanes - 1) / kLanes, stride = vectors * kLanes;
  float* h = scratch<float>(p.size * stride + 2 * kSsdTokens * stride + 2 * kSsdTokens * (p.size + kLanes));
  float* b = h + p.size * stride;
  float* c = b + kSsdTokens * stride;
  float* u = c + kSsdTokens * stride;              // [kSsdTokens, size]
  float* y = u + kSsdTokens * (p.size + kLanes);  // [kSsdTokens, size]
  // Zero behind the states, too: whole vectors are computed.
  std::memset(h, 0, (p.size + 2 * kSsdTokens) * stride * sizeof(float));
  const int64_t from = q.first_slot(r);
  const Any state{p.state.p, p.state.dtype};
  const auto row_of = [&](int64_t slot, int64_t i) { return slot * p.slot_stride + (head * p.size + i) * p.states; };
  if (from >= 0) {
    for (int64_t i = 0; i < p.size; ++i) {
      for_lanes(p.states, [&](int64_t s, auto n) { store(h + i * stride + s, state.load(row_of(from, i) + s, n), n); });
    }
  }
  const auto keep = [&](int64_t to) {
    for (int64_t i = 0; i < p.size; ++i) {
      for_lanes(p.states, [&](int64_t s, auto n) { p.state.store(row_of(to, i) + s, load(h + i * stride + s, n), n); });
    }
  };
  const int64_t group = head * p.groups / p.heads;
  const float bias = p.dt_bias ? p.dt_bias[head] : 0.0f, skip = p.D ? p.D[head] : 0.0f;
  const int64_t start = q.start(r), end = q.end(r);
  const bool each = q.window > 1 && end - start <= q.window;
  for (int64_t t = start; t < end;) {
    const int64_t count = each || end - t < kSsdTokens ? 1 : kSsdTokens;
    float decay[kSsdTokens], step[kSsdTokens];
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = t + k;
      const vf dt = softplus(splat(p.dt.at(row * p.dt_stride + head) + bias));
      step[k] = std::min(std::max(dt[0], p.least), p.most);
      decay[k] = exp(splat(step[k] * p.A[head]))[0];
      const int64_t at = (row * p.groups + group) * p.states;
      std::memcpy(b + k * stride, p.B + at, p.states * sizeof(float));
      std::memcpy(c + k * stride, p.C + at, p.states * sizeof(float));
      for_lanes(p.size, [&](int64_t i, auto n) {
        store(u + k * p.size + i, p.x.load(row * p.x_stride + head * p.size + i, n), n);
      });
    }
    for (int64_t i = 0; i < p.size; ++i) {
      float dx[kSsdTokens], sums[kSsdTokens];
      for (int64_t k = 0; k < count; ++k) dx[k] = step[k] * u[k * p.size + i];
      if (count == 1) ssd_row<1>(h + i * stride, vectors, b, c, stride, decay, dx, sums);
      else ssd_row<kSsdTokens>(h + i * stride, vectors, b, c, stride, decay, dx, sums);
      for (int64_t k = 0; k < count; ++k) y[k * p.size + i] = sums[k];
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = ((t + k) * p.heads + head) * p.size;
      for_lanes(p.size, [&](int64_t i, auto n) {
        p.out.store(at + i, fma(load(u + k * p.size + i, n), splat(skip), load(y + k * p.size + i, n)), n);
      });
    }
    t += count;
    const int64_t to = q.slot_after(r, t - 1 - start);
    if (to >= 0) keep(to);
  }
  if (start == end && q.slot_after(r, -1) >= 0) keep(q.slot_after(r, -1));
}

// Calls piece(r, k) for k < parts of every request that is no padding; a piece's work is `bytes` for a token.
template <class Piece>
void for_parts(const Requests& q, int64_t parts, int64_t bytes, const Piece& piece) {
  const int64_t tokens = std::max<int64_t>(1, q.tokens / std::max<int64_t>(1, q.count));
  parallel_for(q.count * parts, tokens * bytes, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (!q.padding(k / parts)) piece(k / parts, k % parts);
    }
  });
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// out, x, dtype, x_stride, width, taps, weight, its dtype, bias or null, its dtype, silu, state or null, its dtype, its
// three strides, its rows, and the requests -> 0.
OPMUX_EXPORT int64_t opmux_causal_conv1d(const Arg* a) {
  Reader in(a);
  Conv p{};
  p.out = in.ptr<void>();
  p.x = in.ptr<void>();
  const int64_t dtype = in.i();
  p.x_stride = in.i();
  p.width = in.i();
  p.taps = in.i();
  p.weight = read_any(in);
  p.bias = read_any(in);
  p.silu = in.i();
  p.state = in.ptr<void>();
  p.state_dtype = in.i();
  p.slot_stride = in.i();
  p.row_stride = in.i();
  p.column_stride = in.i();
  p.state_rows = in.i();
  const Requests q = read_requests(in);
  with_dtype(dtype, [&](auto* tag) { conv<std::remove_pointer_t<decltype(tag)>>(p, q); });
  return 0;
}

// out, x, dt, z or null (each with its dtype, out has x's) and the strides of the three; A, B, C, D or null, dt_bias or
// null, fp32; state or null, its dtype, the stride of its slots; width, states, and the requests -> 0.
OPMUX_EXPORT int64_t opmux_selective_scan(const Arg* a) {
  Reader in(a);
  Selective p{};
  p.out.p = in.ptr<void>();
  p.x = read_any(in);
  p.dt = read_any(in);
  p.z = read_any(in);
  p.out.dtype = p.x.dtype;
  p.x_stride = in.i();
  p.dt_stride = in.i();
  p.z_stride = in.i();
  p.A = in.ptr<float>();
  p.B = in.ptr<float>();
  p.C = in.ptr<float>();
  p.D = in.ptr<float>();
  p.dt_bias = in.ptr<float>();
  p.state.p = in.ptr<void>();
  p.state.dtype = in.i();
  p.slot_stride = in.i();
  p.width = in.i();
  p.states = in.i();
  const Requests q = read_requests(in);
  zero_rows_of_nobody(q, p.out.p, p.width * size_of(p.x.dtype));
  // An exponential for every lane and state: about four bytes' worth of time.
  for_parts(q, (p.width + kLanes - 1) / kLanes, kLanes * (8 + 4 * p.states), [&](int64_t r, int64_t k) {
    selective_piece(p, q, r, k * kLanes);
  });
  return 0;
}

// out, x, dt (with dtypes, out has x's) and their strides; A, B, C, D or null, dt_bias or null, fp32; state or null, its
// dtype, the stride of its slots; heads, size, groups, states, the limits of dt, and the requests -> 0.
OPMUX_EXPORT int64_t opmux_ssd_scan(const Arg* a) {
  Reader in(a);
  Ssd p{};
  p.out.p = in.ptr<void>();
  p.x = read_any(in);
  p.dt = read_any(in);
  p.out.dtype = p.x.dtype;
  p.x_stride = in.i();
  p.dt_stride = in.i();
  p.A = in.ptr<float>();
  p.B = in.ptr<float>();
  p.C = in.ptr<float>();
  p.D = in.ptr<float>();
  p.dt_bias = in.ptr<float>();
  p.state.p = in.ptr<void>();
  p.state.dtype = in.i();
  p.slot_stride = in.i();
  p.heads = in.i();
  p.size = in.i();
  p.groups = in.i();
  p.states = in.i();
  p.least = in.f();
  p.most = in.f();
  const Requests q = read_requests(in);
  zero_rows_of_nobody(q, p.out.p, p.heads * p.size * size_of(p.x.dtype));
  for_parts(q, p.heads, p.size * p.states * 2, [&](int64_t r, int64_t k) { ssd_piece(p, q, r, k); });
  return 0;
}

// out, x, gate (with dtypes, out has x's) and their strides, weight or null (not normalised), its dtype, the dtype to which
// the normalised value and its product are rounded, rows, width, group, eps -> 0.
//
// u = x * silu(gate) in fp32; out = round(u / sqrt(mean(u^2) + eps)) * weight over groups of neighbours; out is contiguous.
OPMUX_EXPORT int64_t opmux_mixer2_gated_norm(const Arg* a) {
  Reader in(a);
  AnyOut out{};
  out.p = in.ptr<void>();
  const Any x = read_any(in), gate = read_any(in);
  const int64_t x_stride = in.i(), gate_stride = in.i();
  const Any weight = read_any(in);
  out.dtype = in.i();
  const int64_t rows = in.i(), width = in.i(), group = in.i();
  const float eps = in.f();
  const auto rounded = [](int64_t dtype, vf v) {
    return dtype == BF16 ? round_to<bf16>(v) : dtype == F16 ? round_to<f16>(v) : v;
  };
  parallel_for(rows, width * 12, [&](int64_t begin, int64_t end) {
    float* u = scratch<float>(group);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < width; first += group) {
        vf squares = {};
        for_lanes(group, [&](int64_t i, auto n) {
          const vf z = gate.load(row * gate_stride + first + i, n);
          const vf v = x.load(row * x_stride + first + i, n) * (z * sigmoid(z));
          store(u + i, v, n);
          squares = fma(v, v, squares);  // lanes behind the row loaded x as zero
        });
        const float scale = weight.p ? 1.0f / std::sqrt(sum(squares) / static_cast<float>(group) + eps) : 1.0f;
        for_lanes(group, [&](int64_t i, auto n) {
          vf y = load(u + i, n) * scale;
          if (weight.p) y = rounded(x.dtype, y) * weight.load(first + i, n);
          out.store(row * width + first + i, y, n);
        });
      }
    }
  });
  return 0;
}
