// The inner routine of attention: one block of query rows against one range of keys of one key head, with the softmax
// computed on the way (Milakov and Gimelshein 2018, arXiv 1805.02867).
//
// Query rows are lanes: scores come out as [key][row], so that maximum, exponential and sum of a row never leave its lane,
// and the packed weights are at once the left matrix of the product with the values. The rows of a block are all queries
// of the heads that share a key head, so grouped heads and short queries fill the lanes together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "panel.h"
#include "problem.h"
#include "vec_math.h"

namespace opmux {

constexpr int kMaxRows = kMaxVectors * kLanes;
// Keys at a time: scores of 64 rows (24 KB) stay in the first- and second-level caches. Even, and a multiple of kTileRows.
constexpr int kKeys = 96;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// How a storage type is multiplied: in pairs of bf16 where the processor can, otherwise as fp32.
template <class T> struct StepsOf { using type = SingleSteps; };
#if defined(__AVX512BF16__)
template <> struct StepsOf<bf16> { using type = PairSteps; };
#endif

// 2^x for x <= 0 or so; relative error 1e-7. Exactly zero far below, NaN stays.
inline vf exp2(vf x) {
  x = x < -160.0f ? splat(-160.0f) : x;
  const vf n = nearest(x);
  const vf r = x - n;
  vf p = splat(1.53441055e-4f);
  p = fma(p, r, splat(1.34054618e-3f));
  p = fma(p, r, splat(9.61854495e-3f));
  p = fma(p, r, splat(5.55031262e-2f));
  p = fma(p, r, splat(2.40226462e-1f));
  p = fma(p, r, splat(6.93147242e-1f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power_of_two(p, n);
}

// Two rows of a right matrix whose steps are pairs of rows: out[i] = (a[i], b[i]); b null: (a[i], 0).
inline void interleave(const bf16* a, const bf16* b, int64_t size, uint32_t* out) {
  for_lanes(size, [&](int64_t i, auto n) {
    vu both = __builtin_convertvector(load_bits<vh>(a + i, n), vu);
    if (b) both |= __builtin_convertvector(load_bits<vh>(b + i, n), vu) << 16;
    store_bits(out + i, both, n);
  });
}

// Two vectors of weights, rounded to bf16, as one vector of pairs.
#if defined(__AVX512BF16__)
inline vf pair_up(vf a, vf b) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh packed = _mm512_cvtne2ps_pbh(b, a);
  return (vf)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)packed);
}
#endif

// One thread's working memory, for one block at a time.
template <class T>
class Block {
  using Steps = typename StepsOf<T>::type;
  static constexpr bool kPaired = !std::is_same_v<Steps, SingleSteps>;

 public:
  Block() = default;
  ~Block() { std::free(memory_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // The rows [first, first + rows) of key head `head` of sequence b; row r is query r / group of head r % group.
  void open(const Attention<T>& a, int64_t b, int64_t head, int64_t first, int64_t rows) {
    reserve(a);
    b_ = b, head_ = head, first_ = first, rows_ = rows;
    sequence_ = a.sequence(b);
    vectors_ = static_cast<int>((rows + kLanes - 1) / kLanes);
    const int64_t group = a.group(), offset = sequence_.keys - sequence_.queries;
    for (int64_t m = 0; m < kMaxRows; ++m) {
      positions_[m] = static_cast<int32_t>(offset + (first + std::min(m, rows - 1)) / group);
    }
    for (int v = 0; v < kMaxVectors; ++v) top_[v] = splat(kLowest), total_[v] = vf{};
    std::memset(sums_, 0, a.value_size * vectors_ * sizeof(vf));
    const T* at[kMaxRows];
    for (int64_t m = 0; m < rows; ++m) at[m] = query(a, m);
    with_vectors([&](auto mv) {
      constexpr int MV = decltype(mv)::value;
      pack_panel<MV>(Steps{}, rows, a.size, panel_, [&](int64_t m) { return at[m]; });
      if (a.grid_columns > 0) {
        lean<MV>(a, a.row_table, a.grid_rows, bias_, [&](int64_t query) { return query / a.grid_columns; });
        lean<MV>(a, a.column_table, a.grid_columns, bias_ + a.grid_rows * MV * kLanes,
                 [&](int64_t query) { return query % a.grid_columns; });
      }
    });
  }

  // The keys that some row of the block may see.
  void visible(const Attention<T>& a, int64_t& begin, int64_t& end) const {
    begin = a.window > 0 ? std::max<int64_t>(0, positions_[0] - a.window + 1) : 0;
    end = sequence_.keys;
    if (a.causal) end = std::clamp<int64_t>(positions_[rows_ - 1] + int64_t{1}, 0, end);
    begin = std::min(begin, end);
  }

  // Takes in the keys [begin, end).
  void run(const Attention<T>& a, int64_t begin, int64_t end) {
    with_vectors([&](auto mv) {
      for (int64_t key = begin, n; key < end; key += n) {
        n = std::min<int64_t>(kKeys, end - key);
        if (a.table) n = std::min(n, a.page - key % a.page);
        take<decltype(mv)::value>(a, key, n);
      }
    });
  }

  // Writes the rows; a row that saw no key is zero.
  void close(const Attention<T>& a) {
    if (a.lse) {
      const float scale = plain(a) ? a.scale : 1.0f;
      for (int64_t m = 0; m < rows_; ++m) {
        const float top = top_[m / kLanes][m % kLanes], total = total_[m / kLanes][m % kLanes];
        a.lse[number(a, m)] = total == 0.0f ? kLowest : top * scale + std::log(total);
      }
    }
    with_vectors([&](auto mv) {
      constexpr int MV = decltype(mv)::value;
      vf inverse[MV];
      for (int v = 0; v < MV; ++v) inverse[v] = total_[v] == 0.0f ? vf{} : 1.0f / total_[v];
      for (int64_t d = 0; d < a.value_size; ++d) {
        for (int v = 0; v < MV; ++v) {
          float* at = sums_ + (d * MV + v) * kLanes;
          store(at, load(at) * inverse[v]);
        }
      }
    });
    for (int v = 0; v < vectors_; ++v) {
      const int64_t rows = std::min<int64_t>(kLanes, rows_ - v * kLanes);
      T* out[kLanes];
      for (int64_t m = 0; m < rows; ++m) out[m] = result(a, v * kLanes + m);
      for_lanes(a.value_size, [&](int64_t d, auto n) {
        vf columns[kLanes];
        // Beyond the last column lies memory of ours; what it holds is not stored.
        for (int64_t i = 0; i < kLanes; ++i) columns[i] = load(sums_ + ((d + i) * vectors_ + v) * kLanes);
        transpose(columns);
        for (int64_t m = 0; m < rows; ++m) store(out[m] + d, columns[m], n);
      });
    }
  }

  // What a partial result consists of, for merging: weighted sums, their total and the maximum that they are relative to.
  static int64_t partial_floats(const Attention<T>& a) { return (a.value_size + 2) * kMaxRows; }

  void save(const Attention<T>& a, float* to) const {
    const size_t n = vectors_ * kLanes;
    std::memcpy(to, sums_, a.value_size * n * sizeof(float));
    std::memcpy(to + a.value_size * n, top_, n * sizeof(float));
    std::memcpy(to + (a.value_size + 1) * n, total_, n * sizeof(float));
  }

  void merge(const Attention<T>& a, const float* from) {
    const float factor = exponent(a);
    for (int v = 0; v < vectors_; ++v) {
      const int64_t n = vectors_ * kLanes, at = v * kLanes;
      const vf other_top = load(from + a.value_size * n + at), other_total = load(from + (a.value_size + 1) * n + at);
      const vf top = other_top > top_[v] ? other_top : top_[v];
      const vf base = top == kLowest ? vf{} : top;
      const vf mine = exp2((top_[v] - base) * factor), others = exp2((other_top - base) * factor);
      for (int64_t d = 0; d < a.value_size; ++d) {
        store(sums_ + d * n + at, load(sums_ + d * n + at) * mine + load(from + d * n + at) * others);
      }
      total_[v] = total_[v] * mine + other_total * others;
      top_[v] = top;
    }
  }

 private:
  // Scores stay unscaled where nothing but the scale is applied to them: then it goes into the exponential.
  static bool plain(const Attention<T>& a) {
    return a.scale > 0 && a.cap == 0 && a.mask_kind == MaskKind::None && a.grid_columns == 0;
  }
  static float exponent(const Attention<T>& a) { return 1.44269504f * (plain(a) ? a.scale : 1.0f); }

  const T* query(const Attention<T>& a, int64_t m) const {
    const int64_t r = first_ + m, group = a.group();
    return sequence_.q + r / group * a.q_token + (head_ * group + r % group) * a.q_head;
  }

  // The number of a row among those of the result, [B, S, N].
  int64_t number(const Attention<T>& a, int64_t m) const {
    const int64_t r = first_ + m, group = a.group();
    return (b_ * a.queries + r / group) * a.heads + head_ * group + r % group;
  }

  T* result(const Attention<T>& a, int64_t m) const {
    const int64_t r = first_ + m, group = a.group();
    return sequence_.out + (r / group * a.heads + head_ * group + r % group) * a.value_size;
  }

  // The key `key` in k, v or tail: so many tokens from the sequence's first, or in its page, counted from the first of all.
  const T* place(const Attention<T>& a, const T* first, const T* pages, int64_t key, int64_t batch_stride, int64_t token_stride) const {
    if (!a.table) return first + key * token_stride;
    return pages + a.table[b_ * a.table_stride + key / a.page] * batch_stride + key % a.page * token_stride;
  }

  template <class Body>
  void with_vectors(const Body& body) const {
    if (vectors_ == 1) return body(std::integral_constant<int, 1>{});
    if constexpr (kMaxVectors == 2) {
      body(std::integral_constant<int, 2>{});
    } else if (vectors_ == 2) {
      body(std::integral_constant<int, 2>{});
    } else if (vectors_ == 3) {
      body(std::integral_constant<int, 3>{});
    } else {
      body(std::integral_constant<int, 4>{});
    }
  }

  // Keys as right matrix of the scores; in place they may be in two parts.
  struct Keys {
    Right head, tail;
    int64_t head_steps, tail_steps;
  };

  // The keys from `key` on, in place if steps can be read there.
  Keys keys(const Attention<T>& a, int64_t key, int64_t n) {
    const T* k = place(a, sequence_.k, a.k, key, a.k_batch, a.k_token) + head_ * a.k_head;
    if (a.tail_size == 0) return {rows(a, k, a.k_token, n), {}, steps(a.size), 0};
    const T* tail = place(a, a.tail + b_ * a.tail_batch, a.tail, key, a.tail_batch, a.tail_token) + head_ * a.tail_head;
    const int64_t front = a.size - a.tail_size;
    if (kInPlace && front % Steps::kPerStep == 0 && a.tail_size % Steps::kPerStep == 0) {
      return {in_place(k, a.k_token), in_place(tail, a.tail_token), steps(front), steps(a.tail_size)};
    }
    const int64_t width = steps(a.size) * Steps::kPerStep;
    copy(k, a.k_token, n, front, 0, width);
    copy(tail, a.tail_token, n, a.tail_size, front, width);
    return {copied(width), {}, steps(a.size), 0};
  }

  // n rows of a head's size as right matrix whose steps go along the row.
  Right rows(const Attention<T>& a, const T* base, int64_t stride, int64_t n) {
    if (kInPlace && a.size % Steps::kPerStep == 0) return in_place(base, stride);
    const int64_t width = steps(a.size) * Steps::kPerStep;
    copy(base, stride, n, a.size, 0, width);
    return copied(width);
  }

  static constexpr bool kInPlace = kPaired || std::is_same_v<T, float>;
  static int64_t steps(int64_t size) { return (size + Steps::kPerStep - 1) / Steps::kPerStep; }
  static Right in_place(const T* base, int64_t stride) {
    return {reinterpret_cast<const char*>(base), static_cast<int64_t>(stride * sizeof(T)), 4};
  }

  Right copied(int64_t width) const {
    return {reinterpret_cast<const char*>(keys_), static_cast<int64_t>(width * sizeof(typename Steps::Element)), 4};
  }

  // n rows of `size` elements into columns `from` on of a matrix of `width` columns; what is left of a last step is zero.
  void copy(const T* base, int64_t stride, int64_t n, int64_t size, int64_t from, int64_t width) {
    using Element = typename Steps::Element;
    Element* to = reinterpret_cast<Element*>(keys_);
    for (int64_t j = 0; j < n; ++j) {
      if (from + size < width) to[j * width + width - 1] = Element{};
      for_lanes(size, [&](int64_t i, auto lanes) { store(to + j * width + from + i, load(base + j * stride + i, lanes), lanes); });
    }
  }

  // The values from `key` on as right matrix of the weighted sum: its rows are the columns of V.
  Right values(const Attention<T>& a, int64_t key, int64_t n) {
    const T* v = place(a, sequence_.v, a.v, key, a.v_batch, a.v_token) + head_ * a.v_head;
    if constexpr (kPaired) {
      for (int64_t j = 0; j < n; j += 2) {
        interleave(v + j * a.v_token, j + 1 < n ? v + (j + 1) * a.v_token : nullptr, a.value_size, values_ + j / 2 * a.value_size);
      }
    } else if constexpr (std::is_same_v<T, float>) {
      return {reinterpret_cast<const char*>(v), 4, a.v_token * 4};
    } else {
      float* to = reinterpret_cast<float*>(values_);
      for (int64_t j = 0; j < n; ++j) {
        for_lanes(a.value_size, [&](int64_t i, auto lanes) { store(to + j * a.value_size + i, load(v + j * a.v_token + i, lanes)); });
      }
    }
    return {reinterpret_cast<const char*>(values_), 4, a.value_size * 4};
  }

  // bias[i][row] = the row's query times entry (place of the query - i + n - 1) of a table with 2 n - 1 entries.
  template <int MV, class Place>
  void lean(const Attention<T>& a, const T* table, int64_t n, float* bias, const Place& place) {
    for (int64_t first = 0; first < 2 * n - 1; first += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, 2 * n - 1 - first);
      const Right right = rows(a, table + first * a.size, a.size, count);
      for_tiles(count, [&](auto nr, int64_t r) {
        constexpr int NR = decltype(nr)::value;
        vf acc[NR][MV] = {};
        multiply_tile<Steps>(panel_, Right{right.base + r * right.row_stride, right.row_stride, 4}, steps(a.size), acc);
        for (int i = 0; i < NR; ++i) {
          for (int v = 0; v < MV; ++v) store(scores_ + ((r + i) * MV + v) * kLanes, acc[i][v]);
        }
      });
      for (int64_t m = 0; m < MV * kLanes; ++m) {
        const int64_t last = place((first_ + std::min(m, rows_ - 1)) / a.group()) + n - 1;
        const int64_t begin = std::max<int64_t>(0, last - (first + count - 1)), end = std::min(n, last - first + 1);
        for (int64_t i = begin; i < end; ++i) bias[i * MV * kLanes + m] = scores_[(last - i - first) * MV * kLanes + m];
      }
    }
  }

  template <int MV>
  void take(const Attention<T>& a, int64_t key, int64_t n) {
    const Seen seen = a.mask_kind == MaskKind::None ? Seen::All : read_mask(a, key, n);
    if (seen == Seen::None) return;
    vf top[MV];
    for (int v = 0; v < MV; ++v) top[v] = top_[v];
    // Every row sees keys up to positions_[0] and none at or before the last position less the window.
    const int64_t limit = a.causal ? positions_[0] : sequence_.keys;
    const int64_t lost = a.window > 0 ? positions_[rows_ - 1] - a.window : -1;
    const bool untouched = plain(a) && key + n - 1 <= limit && key > lost;
    const Keys right = keys(a, key, n);
    const auto from = [](Right part, int64_t r) { return Right{part.base + r * part.row_stride, part.row_stride, 4}; };
    for_tiles(n, [&](auto nr, int64_t r) {
      constexpr int NR = decltype(nr)::value;
      vf acc[NR][MV] = {};
      multiply_tile<Steps>(panel_, from(right.head, r), right.head_steps, acc);
      if (right.tail_steps) {
        multiply_tile<Steps>(panel_ + right.head_steps * MV * kLanes, from(right.tail, r), right.tail_steps, acc);
      }
#pragma GCC unroll 6
      for (int i = 0; i < NR; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < MV; ++v) {
          if (untouched) top[v] = acc[i][v] > top[v] ? acc[i][v] : top[v];
          store(scores_ + ((r + i) * MV + v) * kLanes, acc[i][v]);
        }
      }
    });
    if (!untouched) adjust<MV>(a, key, n, limit, lost, seen, top);
    weigh<MV>(exponent(a), n, top);
    accumulate<MV>(a, key, n);
  }

  // Scale, cap, bias and masks, in this order.
  template <int MV>
  void adjust(const Attention<T>& a, int64_t key, int64_t n, int64_t limit, int64_t lost, Seen seen, vf (&top)[MV]) {
    const float scale = plain(a) ? 1.0f : a.scale;
    for (int64_t j = 0; j < n; ++j) {
      const bool leans = a.grid_columns > 0;
      const float* by_row = leans ? bias_ + (key + j) / a.grid_columns * MV * kLanes : nullptr;
      const float* by_column = leans ? bias_ + (a.grid_rows + (key + j) % a.grid_columns) * MV * kLanes : nullptr;
      for (int v = 0; v < MV; ++v) {
        float* at = scores_ + (j * MV + v) * kLanes;
        vf s = load(at) * scale;
        if (a.cap != 0) s = a.cap * tanh(s / a.cap);
        if (leans) s += load(by_row + v * kLanes) + load(by_column + v * kLanes);
        if (seen == Seen::Some) s += load(mask_ + (j * MV + v) * kLanes);
        vi position;
        std::memcpy(&position, positions_ + v * kLanes, sizeof position);
        const int32_t at_key = static_cast<int32_t>(key + j);
        if (a.causal && key + j > limit) s = position >= at_key ? s : splat(kLowest);
        if (key + j <= lost) s = position - static_cast<int32_t>(a.window) < at_key ? s : splat(kLowest);
        top[v] = s > top[v] ? s : top[v];
        store(at, s);
      }
    }
  }

  // Scores to weights, in place (paired: two keys to one), and what came before to the new maximum.
  template <int MV>
  void weigh(float factor, int64_t n, const vf (&top)[MV]) {
    vf base[MV], added[MV];
    for (int v = 0; v < MV; ++v) {
      base[v] = top[v] == kLowest ? vf{} : top[v];
      shrink_[v] = exp2((top_[v] - base[v]) * factor);
      added[v] = vf{};
    }
    const auto weight = [&](int64_t j, int v) {
      const vf w = exp2((load(scores_ + (j * MV + v) * kLanes) - base[v]) * factor);
      added[v] += w;
      return w;
    };
    if constexpr (kPaired) {
#if defined(__AVX512BF16__)
      for (int64_t j = 0; j < n; j += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < MV; ++v) {
          const vf a = weight(j, v), b = j + 1 < n ? weight(j + 1, v) : vf{};
          store(scores_ + (j / 2 * MV + v) * kLanes, pair_up(a, b));
        }
      }
#endif
    } else {
      for (int64_t j = 0; j < n; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < MV; ++v) store(scores_ + (j * MV + v) * kLanes, weight(j, v));
      }
    }
    for (int v = 0; v < MV; ++v) {
      total_[v] = total_[v] * shrink_[v] + added[v];
      top_[v] = top[v];
    }
  }

  template <int MV>
  void accumulate(const Attention<T>& a, int64_t key, int64_t n) {
    const Right right = values(a, key, n);
    const int64_t steps = (n + Steps::kPerStep - 1) / Steps::kPerStep;
    for_tiles(a.value_size, [&](auto nr, int64_t d) {
      constexpr int NR = decltype(nr)::value;
      vf acc[NR][MV];
#pragma GCC unroll 6
      for (int i = 0; i < NR; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < MV; ++v) acc[i][v] = load(sums_ + ((d + i) * MV + v) * kLanes) * shrink_[v];
      }
      multiply_tile<Steps>(reinterpret_cast<const uint32_t*>(scores_), Right{right.base + d * 4, 4, right.step_stride}, steps, acc);
#pragma GCC unroll 6
      for (int i = 0; i < NR; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < MV; ++v) store(sums_ + ((d + i) * MV + v) * kLanes, acc[i][v]);
      }
    });
  }

  // mask_[key][row] = what to add to a score. Rows of one group share a row of the mask where heads do.
  Seen read_mask(const Attention<T>& a, int64_t key, int64_t n) {
    const int64_t group = a.group(), width = vectors_ * kLanes;
    int64_t seen = 0;
    bool neutral = true;
    for (int64_t m = 0; m < rows_; ++m) {
      const int64_t r = first_ + m;
      if (m > 0 && a.mask_head == 0 && r % group != 0) {
        for (int64_t j = 0; j < n; ++j) mask_[j * width + m] = mask_[j * width + m - 1];
        continue;
      }
      const int64_t at = b_ * a.mask_batch + (head_ * group + r % group) * a.mask_head + r / group * a.mask_query + key * a.mask_key;
      for (int64_t j = 0; j < n; ++j) {
        float add;
        if (a.mask_kind == MaskKind::Bool) {
          add = static_cast<const uint8_t*>(a.mask)[at + j * a.mask_key] ? 0.0f : kLowest;
        } else {
          add = load(static_cast<const T*>(a.mask) + at + j * a.mask_key, Part{1})[0];
        }
        mask_[j * width + m] = add;
        seen += add != kLowest;
        neutral &= add == 0.0f;
      }
    }
    for (int64_t m = rows_; m < width; ++m) {
      for (int64_t j = 0; j < n; ++j) mask_[j * width + m] = 0.0f;
    }
    return seen == 0 ? Seen::None : neutral ? Seen::All : Seen::Some;
  }

  void reserve(const Attention<T>& a) {
    const int64_t widest = std::max(a.size, a.value_size) + kLanes;
    const int64_t grid = a.grid_rows + a.grid_columns;
    const int64_t need =
        ((2 * widest + grid + 2 * kKeys) * kMaxRows + 2 * kKeys * widest + 4 * kLanes) * sizeof(float);
    if (need > size_) {
      std::free(memory_);
      size_ = (need + 63) / 64 * 64;
      memory_ = static_cast<float*>(std::aligned_alloc(64, size_));
    }
    // Each part begins on a vector: kMaxRows and kKeys are multiples of the lanes.
    float* next = memory_;
    const auto part = [&](int64_t floats) {
      float* at = next;
      next += (floats + kLanes - 1) / kLanes * kLanes;
      return at;
    };
    panel_ = reinterpret_cast<uint32_t*>(part(widest * kMaxRows));
    sums_ = part(widest * kMaxRows);
    scores_ = part(kKeys * kMaxRows);
    mask_ = part(kKeys * kMaxRows);
    bias_ = part(grid * kMaxRows);
    keys_ = part(kKeys * widest);
    values_ = reinterpret_cast<uint32_t*>(part(kKeys * widest));
  }

  vf top_[kMaxVectors], total_[kMaxVectors], shrink_[kMaxVectors];
  int32_t positions_[kMaxRows];
  Sequence<T> sequence_{};
  int64_t b_ = 0, head_ = 0, first_ = 0, rows_ = 0;
  int vectors_ = 0;
  float* memory_ = nullptr;
  int64_t size_ = 0;
  uint32_t *panel_ = nullptr, *values_ = nullptr;
  float *sums_ = nullptr, *scores_ = nullptr, *mask_ = nullptr, *bias_ = nullptr, *keys_ = nullptr;
};

}  // namespace opmux
