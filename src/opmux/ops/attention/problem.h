// What attention is asked for: queries, keys and values where they lie, and which keys a query sees.
#pragma once

#include <algorithm>
#include <cstdint>

namespace opmux {

enum class MaskKind : int64_t { None, Bool, Float };
enum class Seen { None, Some, All };  // what a mask shows of a block

// One sequence: a row of the batch, or a segment of packed tokens.
template <class T>
struct Sequence {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  int64_t queries, keys;
};

template <class T>
struct Attention {
  const T* q;
  const T* k;
  const T* v;
  T* out;  // [B, S, N, Dv] contiguous
  int64_t batch, queries, keys, heads, key_heads, size, value_size;
  int64_t q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head;  // strides, elements
  float scale, cap;    // cap: 0 for none
  int64_t causal, window;  // window: keys that a query sees, itself included; 0 for all
  const int64_t* lengths;  // keys of each sequence, or null
  MaskKind mask_kind;
  const void* mask;  // bool, or T to add
  int64_t mask_batch, mask_head, mask_query, mask_key;
  // The last `tail_size` elements of a key lie elsewhere, such as a rotary part that the heads share; 0: nothing does.
  const T* tail = nullptr;
  int64_t tail_size = 0, tail_batch = 0, tail_token = 0, tail_head = 0;
  // Keys in pages: token t of sequence b lies in page table[b * table_stride + t / page], and the batch strides of k, v and
  // tail are those of pages. Null: not in pages.
  const int64_t* table = nullptr;
  int64_t table_stride = 0, page = 0;
  float* lse = nullptr;  // [B, S, N]: the logarithm of each row's sum of exponentials, or null

  // Packed: sequence b is segment b % segments of row b / segments, its tokens [bounds[segment], bounds[segment + 1]).
  const int64_t* bounds = nullptr;
  int64_t segments = 1;

  // The keys are a grid: what the query's product with row `distance + grid - 1` of a contiguous [2 grid - 1, D] table gives
  // is added to the scaled score, once for the rows of the grid and once for its columns. grid_columns 0: no such bias.
  const T *row_table = nullptr, *column_table = nullptr;
  int64_t grid_rows = 0, grid_columns = 0;

  int64_t group() const { return heads / key_heads; }
  Sequence<T> sequence(int64_t b) const {
    const int64_t row = b / segments, begin = bounds ? bounds[b % segments] : 0;
    const int64_t in_row = bounds ? bounds[b % segments + 1] - begin : queries;
    const int64_t seen = bounds ? in_row : lengths ? std::clamp<int64_t>(lengths[b], 0, keys) : keys;
    return {q + row * q_batch + begin * q_token, k + row * k_batch + begin * k_token, v + row * v_batch + begin * v_token,
            out + (row * queries + begin) * heads * value_size, in_row, seen};
  }
};

}  // namespace opmux
