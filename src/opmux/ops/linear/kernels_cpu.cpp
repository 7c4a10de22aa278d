// y = x W^T, W [out, in] row-major: summed in fp32, bias added in fp32, rounded once to the storage type. With an
// epilogue, what follows is computed from the rounded value, as the separate ops would.
#include <cstdlib>

#include "abi.h"
#include "few_tokens.h"
#include "many_tokens.h"
#include "pool.h"
#include "threads.h"
#include "vec_math.h"

namespace opmux {
namespace {

#if defined(__AVX512BF16__)
// Dot products or panels (bf16). Measured, one thread, us: 3072x576 8 tokens 192 against 310, 16 tokens 360 against 310;
// 4096x4096, whose 8 tokens overflow the first-level cache, 3711 against 2720.
bool few_tokens(int64_t tokens, int64_t in) { return tokens <= 4 || (tokens <= 8 && tokens * in <= 20'480); }
#endif

// Without panels (fp32, fp16, or no avx512_bf16) dot products serve every call that reaches this library.
constexpr int64_t kTokenGroup = 16;
constexpr int64_t kPieceBytes = 32 << 10;  // of weights: about 1 us
constexpr int64_t kPieceSteps = 60'000;    // of vector multiply-adds: about 15 us
constexpr int64_t kMaxPieceRows = 256;
constexpr int64_t kPanelRows = 48;  // a multiple of every tile height and of 16
constexpr int64_t kPanelBytes = 512 << 10;

enum class Then { Nothing, Add, SiluAndMul };

template <class T>
struct Call {
  T* y;
  const T* x;
  const T* w;
  const T* bias;
  const T* residual;
  int64_t tokens, out, in, x_stride, w_stride, residual_stride;  // out: columns of y
};

// Columns [first, first + n) of y's row m, from sums (and for SiluAndMul those of the other half).
template <class T, Then then>
void finish(const Call<T>& c, int64_t m, int64_t first, int64_t n, const float* sums, const float* others) {
  T* y = c.y + m * c.out + first;
  for_lanes(n, [&](int64_t i, auto lanes) {
    vf v = load(sums + i, lanes);
    if (c.bias) v += load(c.bias + first + i, lanes);
    if constexpr (then == Then::Add) {
      v = load(c.residual + m * c.residual_stride + first + i, lanes) + round_to<T>(v);
    }
    if constexpr (then == Then::SiluAndMul) {
      vf up = load(others + i, lanes);
      if (c.bias) up += load(c.bias + c.out + first + i, lanes);
      const vf gate = round_to<T>(v);
      v = round_to<T>(gate / (1.0f + exp(-gate))) * round_to<T>(up);
    }
    store(y + i, v, lanes);
  });
}

// The tokens as Dot wants them: in place, or converted once into a buffer of this thread.
template <class T>
const typename Dot<T>::Token* tokens_for_dot(const Call<T>& c, int64_t& stride) {
  using Token = typename Dot<T>::Token;
  if constexpr (std::is_same_v<Token, T>) {
    // Tokens that lie a multiple of 4 KB apart evict each other from the first-level cache.
    if (c.tokens < 4 || c.x_stride * sizeof(T) % 4096 != 0) {
      stride = c.x_stride;
      return c.x;
    }
  }
  static thread_local std::vector<Token> buffer;
  stride = c.in + Dot<T>::kStep;
  buffer.resize(c.tokens * stride);
  for (int64_t m = 0; m < c.tokens; ++m) {
    for_lanes(c.in, [&](int64_t k, auto n) { store(buffer.data() + m * stride + k, load(c.x + m * c.x_stride + k, n), n); });
  }
  return buffer.data();
}

template <class T, Then then>
void few(const Call<T>& c) {
  int64_t stride;
  const auto* x = tokens_for_dot(c, stride);
  const int64_t row_bytes = c.in * sizeof(T);
  const int64_t rows = std::clamp<int64_t>(kPieceBytes / std::max<int64_t>(row_bytes, 1) / 8 * 8, 8, kMaxPieceRows);
  const auto piece = [&](int64_t p) {
    alignas(64) float sums[kTokenGroup * kMaxPieceRows], others[then == Then::SiluAndMul ? kTokenGroup * kMaxPieceRows : 1];
    const int64_t first = p * rows, n = std::min(rows, c.out - first);
    for (int64_t m0 = 0; m0 < c.tokens; m0 += kTokenGroup) {
      const int64_t tokens = std::min(kTokenGroup, c.tokens - m0);
      const auto rows_from = [&](int64_t row, float* out) {
        dots<T>(x + m0 * stride, stride, tokens, c.w + row * c.w_stride, c.w_stride, n, c.in, out, kMaxPieceRows);
      };
      rows_from(first, sums);
      if constexpr (then == Then::SiluAndMul) rows_from(c.out + first, others);
      for (int64_t m = 0; m < tokens; ++m) {
        finish<T, then>(c, m0 + m, first, n, sums + m * kMaxPieceRows, others + (then == Then::SiluAndMul ? m * kMaxPieceRows : 0));
      }
    }
  };
  const int64_t pieces = (c.out + rows - 1) / rows;
  if (c.out * row_bytes < kSerialBytes) {
    for (int64_t p = 0; p < pieces; ++p) piece(p);
  } else {
    share(pieces, piece);
  }
}

#if defined(__AVX512BF16__)

// A thread's packed tokens, kept while its pieces are of the same block of tokens.
struct Panel {
  ~Panel() { std::free(data); }
  uint32_t* data = nullptr;
  size_t size = 0;
  int64_t call = -1, block = -1;

  uint32_t* reserve(size_t bytes) {
    if (size < bytes) {
      std::free(data);
      data = static_cast<uint32_t*>(std::aligned_alloc(64, bytes));
      size = bytes;
    }
    return data;
  }
};

template <Then then, int MV>
void block_of_tokens(const Call<bf16>& c, const uint32_t* panel, int64_t m0, int64_t tokens, int64_t first, int64_t end) {
  alignas(64) float product[kPanelRows * MV * kLanes], sums[MV * kLanes * kPanelRows], others[MV * kLanes * kPanelRows];
  for (; first < end; first += kPanelRows) {
    const int64_t n = std::min(kPanelRows, end - first);
    multiply_panel<MV>(panel, c.w + first * c.w_stride, c.w_stride, n, c.in, product);
    transpose_block<MV>(product, n, tokens, sums, kPanelRows);
    if constexpr (then == Then::SiluAndMul) {
      multiply_panel<MV>(panel, c.w + (c.out + first) * c.w_stride, c.w_stride, n, c.in, product);
      transpose_block<MV>(product, n, tokens, others, kPanelRows);
    }
    for (int64_t m = 0; m < tokens; ++m) finish<bf16, then>(c, m0 + m, first, n, sums + m * kPanelRows, others + m * kPanelRows);
  }
}

template <Then then>
void many(const Call<bf16>& c) {
  static std::atomic<int64_t> calls{0};
  const int64_t call = calls.fetch_add(1);
  // Panels that fit into the second-level cache: fewer lanes for long rows.
  int64_t lanes = 64;
  while (lanes > 16 && lanes * c.in * 2 > kPanelBytes) lanes /= 2;
  const int64_t steps_per_row = (lanes / 16) * c.in / 2 + 1;
  const int64_t rows = kPanelRows * std::max<int64_t>(1, kPieceSteps / (kPanelRows * steps_per_row));
  const int64_t across = (c.out + rows - 1) / rows;
  const int64_t blocks = (c.tokens + lanes - 1) / lanes;
  const auto piece = [&](int64_t p) {
    static thread_local Panel panel;
    const int64_t block = p / across, m0 = block * lanes, tokens = std::min(lanes, c.tokens - m0);
    const int64_t first = p % across * rows, end = std::min(first + rows, c.out);
    const auto with_vectors = [&](auto mv) {
      constexpr int MV = decltype(mv)::value;
      uint32_t* data = panel.reserve((c.in + 1) / 2 * MV * 64);
      if (panel.call != call || panel.block != block) {
        pack_panel<MV>(PairSteps{}, tokens, c.in, data, [&](int64_t m) { return c.x + (m0 + m) * c.x_stride; });
        panel.call = call, panel.block = block;
      }
      block_of_tokens<then, MV>(c, data, m0, tokens, first, end);
    };
    if (tokens <= 16) with_vectors(std::integral_constant<int, 1>{});
    else if (tokens <= 32) with_vectors(std::integral_constant<int, 2>{});
    else if (tokens <= 48) with_vectors(std::integral_constant<int, 3>{});
    else with_vectors(std::integral_constant<int, 4>{});
  };
  if (blocks == 1) share(across, piece);
  else share_long(blocks * across, piece);
}

#endif

template <Then then>
int64_t linear(const Arg* a) {
  Reader in(a);
  void* y = in.ptr<void>();
  const void* x = in.ptr<void>();
  const void* w = in.ptr<void>();
  const void* bias = in.ptr<void>();
  const void* residual = in.ptr<void>();
  const int64_t tokens = in.i(), out = in.i(), width = in.i(), x_stride = in.i(), w_stride = in.i(), residual_stride = in.i();
  const int64_t dtype = in.i();
  if (tokens == 0 || out == 0) return 0;
  const ReleaseGil gil(out * width * (1 + tokens / 16) * 2 >= kReleaseGilBytes);
  with_dtype(dtype, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    const Call<T> call{static_cast<T*>(y),           static_cast<const T*>(x), static_cast<const T*>(w), static_cast<const T*>(bias),
                       static_cast<const T*>(residual), tokens, out, width, x_stride, w_stride, residual_stride};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      if (!few_tokens(tokens, width)) return many<then>(call);
    }
#endif
    few<T, then>(call);
  });
  return 0;
}

}  // namespace
}  // namespace opmux

// y [tokens, out] contiguous, x, w [out, in] ([2 out, in] for silu_and_mul: gates, then ups), bias or null, residual or null,
// tokens, out, in, strides of rows of x, w, residual (elements), dtype code. y overlaps nothing.
OPMUX_EXPORT int64_t opmux_linear(const Arg* a) { return opmux::linear<opmux::Then::Nothing>(a); }
OPMUX_EXPORT int64_t opmux_linear_add(const Arg* a) { return opmux::linear<opmux::Then::Add>(a); }
OPMUX_EXPORT int64_t opmux_linear_silu_and_mul(const Arg* a) { return opmux::linear<opmux::Then::SiluAndMul>(a); }
