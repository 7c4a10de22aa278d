// Blocks of many tokens: tokens lie in the lanes of a packed panel, weights are broadcast from where they are.
#pragma once

#include <algorithm>

#include "panel.h"

#if defined(__AVX512BF16__)

namespace opmux {

// c[row][MV * 16 lanes] = weight row . token, for `rows` weight rows.
template <int MV>
inline void multiply_panel(const uint32_t* panel, const bf16* w, int64_t w_stride, int64_t rows, int64_t in, float* c) {
  for_tiles(rows, [&](auto nr, int64_t r) {
    constexpr int NR = decltype(nr)::value;
    vf acc[NR][MV] = {};
    const Right right{reinterpret_cast<const char*>(w + r * w_stride), 2 * w_stride, 4};
    multiply_tile<PairSteps>(panel, right, in / 2, acc, 4 * NR);
    if (in % 2) {
      // The last element has no partner; what follows it in memory is not ours to read.
      const uint32_t* last = panel + (in / 2) * MV * kLanes;
      for (int i = 0; i < NR; ++i) {
        const uint32_t element = w[(r + i) * w_stride + in - 1].bits;
        for (int v = 0; v < MV; ++v) acc[i][v] = PairSteps::multiply_add(acc[i][v], load(reinterpret_cast<const float*>(last) + v * kLanes), element);
      }
    }
    for (int i = 0; i < NR; ++i) {
      for (int v = 0; v < MV; ++v) store(c + ((r + i) * MV + v) * kLanes, acc[i][v]);
    }
  });
}

// rows_of_c[m][row] = c[row][m], for the first `tokens` lanes. Rows are taken 16 at a time,
// so both sides must have room for a multiple of 16.
template <int MV>
inline void transpose_block(const float* c, int64_t rows, int64_t tokens, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += 16) {
    for (int v = 0; v < MV && v * 16 < tokens; ++v) {
      __m512i t[16];
      for (int i = 0; i < 16; ++i) t[i] = _mm512_load_si512(c + ((r + i) * MV + v) * 16);
      transpose_16x16(t);
      const int64_t lanes = std::min<int64_t>(16, tokens - v * 16);
      for (int64_t i = 0; i < lanes; ++i) _mm512_storeu_si512(out + (v * 16 + i) * out_stride + r, t[i]);
    }
  }
}

}  // namespace opmux

#endif
