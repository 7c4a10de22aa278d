// The product at the bottom of matrix multiplication and attention: a panel, whose lanes are rows of the left matrix, times
// single elements of the right matrix, broadcast to all lanes.
//
// The right matrix is read where it lies (a weight, a key cache), only the left one is packed; results come out transposed,
// [right rows][lanes], which makes a softmax over right rows free of horizontal operations.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace opmux {

// One lane and one step: an fp32 of each side.
struct SingleSteps {
  using Element = float;
  static constexpr int kPerStep = 1;
  static vf multiply_add(vf acc, vf panel, uint32_t right) {
    float value;
    std::memcpy(&value, &right, 4);
    return fma(panel, splat(value), acc);
  }
};

#if defined(__AVX512BF16__)
// One lane and one step: two neighbouring bf16 of each side.
struct PairSteps {
  using Element = bf16;
  static constexpr int kPerStep = 2;
  static vf multiply_add(vf acc, vf panel, uint32_t right) {
    return _mm512_dpbf16_ps(acc, (__m512bh)panel, (__m512bh)_mm512_set1_epi32(static_cast<int>(right)));
  }
};
#endif

// Right rows that a tile takes: enough to hide the latency of a multiply-add. More would fit into the registers, but rows
// that lie a multiple of 4 KB apart share eight lines of the first-level cache: 24 rows of 8 KB ran at a tenth of the speed.
constexpr int kTileRows = kLanes == 16 ? 6 : 4;

// The widest panel whose tile the registers hold.
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;

// The right matrix: element (row, step) is the 32 bits at base + row * row_stride + step * step_stride (bytes).
struct Right {
  const char* base;
  int64_t row_stride;
  int64_t step_stride;
};

// acc[row][v] += sum over steps of panel[step][v] * right[row][step]. `ahead` (bytes a step, 0 for none) fetches what
// follows the tile's rows in memory while the tile is computed.
template <class E, int NR, int MV>
inline __attribute__((always_inline)) void multiply_tile(const uint32_t* panel, Right right, int64_t steps, vf (&acc)[NR][MV],
                                                          int64_t ahead = 0) {
  const char* groups[(NR + 2) / 3];
  for (int g = 0; g < (NR + 2) / 3; ++g) groups[g] = right.base + 3 * g * right.row_stride;
  const char* coming = right.base + NR * right.row_stride;
  for (int64_t s = 0; s < steps; ++s) {
    vf p[MV];
#pragma GCC unroll 4
    for (int v = 0; v < MV; ++v) std::memcpy(&p[v], panel + (s * MV + v) * kLanes, sizeof(vf));
    if (ahead) {
      __builtin_prefetch(coming, 0, 2);
      coming += ahead;
    }
#pragma GCC unroll 6
    for (int r = 0; r < NR; ++r) {
      uint32_t element;
      std::memcpy(&element, groups[r / 3] + (r % 3) * right.row_stride, 4);
#pragma GCC unroll 4
      for (int v = 0; v < MV; ++v) acc[r][v] = E::multiply_add(acc[r][v], p[v], element);
    }
#pragma GCC unroll 2
    for (int g = 0; g < (NR + 2) / 3; ++g) groups[g] += right.step_stride;
  }
}

// Calls body(integral_constant<int, NR>, first row) for tiles that cover `rows` right rows.
template <class Body>
inline void for_tiles(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) body(std::integral_constant<int, kTileRows>{}, r);
  for (; r + kTileRows / 2 <= rows; r += kTileRows / 2) body(std::integral_constant<int, kTileRows / 2>{}, r);
  for (; r < rows; ++r) body(std::integral_constant<int, 1>{}, r);
}

#if defined(__AVX512F__)
// Transposes 16 rows of 16 dwords in place.
inline void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int h = 0; h < 16; h += 8) {
    for (int i = 0; i < 4; ++i) {
      t[h + i] = _mm512_shuffle_i32x4(r[h + i], r[h + i + 4], 0x88);
      t[h + i + 4] = _mm512_shuffle_i32x4(r[h + i], r[h + i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#endif

// Transposes as many rows as a vector has lanes, in place.
inline void transpose(vf (&r)[kLanes]) {
#if defined(__AVX512F__)
  __m512i bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = (__m512i)r[i];
  transpose_16x16(bits);
  for (int i = 0; i < 16; ++i) r[i] = (vf)bits[i];
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float upper = r[j][i];
      r[j][i] = r[i][j];
      r[i][j] = upper;
    }
  }
#endif
}

#if defined(__AVX512BF16__)
// panel[step][MV * 16 lanes] = the pair of elements at `step` of row_at(lane), which are `size` long; lanes beyond `rows` and
// the partner of the last of an odd number of elements are zero.
template <int MV, class RowAt>
inline void pack_panel(PairSteps, int64_t rows, int64_t size, uint32_t* panel, const RowAt& row_at) {
  const int64_t steps = (size + 1) / 2;
  for (int64_t s = 0; s < steps; s += 16) {
    const int64_t left = std::min<int64_t>(32, size - 2 * s);
    const auto mask = static_cast<__mmask32>((1ull << left) - 1);
    const int64_t used = std::min<int64_t>(16, steps - s);
    for (int v = 0; v < MV; ++v) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t m = v * 16 + i;
        r[i] = m < rows ? _mm512_maskz_loadu_epi16(mask, row_at(m) + 2 * s) : _mm512_setzero_si512();
      }
      transpose_16x16(r);
      for (int64_t i = 0; i < used; ++i) _mm512_store_si512(panel + ((s + i) * MV + v) * 16, r[i]);
    }
  }
}
#endif

// The same as single fp32, for any storage type.
template <int MV, class RowAt>
inline void pack_panel(SingleSteps, int64_t rows, int64_t size, uint32_t* panel, const RowAt& row_at) {
  std::memset(panel, 0, size * MV * sizeof(vf));
  for (int64_t m = 0; m < rows; ++m) {
    const auto* row = row_at(m);
    for_lanes(size, [&](int64_t k, auto n) {
      const vf v = load(row + k, n);
      const int64_t count = std::min<int64_t>(kLanes, size - k);
      for (int64_t i = 0; i < count; ++i) std::memcpy(panel + (k + i) * MV * kLanes + m, reinterpret_cast<const char*>(&v) + 4 * i, 4);
    });
  }
}

}  // namespace opmux
