// flags: -O2 -ffp-contract=off -fno-associative-math
// Rotary embedding. Without contraction and reassociation, so that each rounding is where PyTorch's own body has it.
#include <type_traits>

#include "abi.h"
#include "memory.h"
#include "threads.h"
#include "vec.h"

namespace opmux {
namespace {

// One of query and key: heads of head_dim elements, anywhere in memory; strides in elements.
struct Heads {
  const void* in;
  void* out;
  int64_t heads, in_batch, in_token, in_head, out_batch, out_token, out_head;
};

struct Rotation {
  int64_t rotary_dim, head_dim, table_dtype;
  bool interleaved;   // pairs (2i, 2i+1) rather than (i, i + rotary_dim / 2)
  bool round_table;   // cos and sin are rounded to the heads' dtype first
  bool round_steps;   // each product is rounded to storage, as eager PyTorch does, and not only the sum
};

// Where a token's angles are: element i of a pair's first member has cos[i], of its second member cos[i + second].
struct Angles {
  const char* cos;
  const char* sin;
  int64_t second;
};

constexpr int64_t kBlock = 256;

// A block of a token's angles in fp32; lanes beyond the block are never read.
struct Block {
  float cos1[kBlock], sin1[kBlock], cos2[kBlock], sin2[kBlock];
};

int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

template <class T>
void fill(float* to, const char* table, int64_t first, int64_t count, const Rotation& r) {
  with_dtype(r.table_dtype, [&](auto* tag) {
    const auto* from = reinterpret_cast<const std::remove_pointer_t<decltype(tag)>*>(table) + first;
    for_lanes(count, [&](int64_t i, auto n) {
      const vf v = load(from + i, n);
      store(to + i, r.round_table ? round_to<T>(v) : v, n);
    });
  });
}

template <class T, bool interleaved, bool round_steps>
void rotate(const T* in, T* out, const Block& angles, int64_t first, int64_t count, int64_t half) {
  const auto step = [](vf v) { return round_steps ? round_to<T>(v) : v; };
  for_lanes(count, [&](int64_t i, auto n) {
    const vf cos1 = load(angles.cos1 + i, n), sin1 = load(angles.sin1 + i, n);
    const vf cos2 = load(angles.cos2 + i, n), sin2 = load(angles.sin2 + i, n);
    Pairs v;
    if constexpr (interleaved) v = load_pairs(in + 2 * (first + i), n);
    else v = {load(in + first + i, n), load(in + half + first + i, n)};
    const Pairs y = {step(v.even * cos1) - step(v.odd * sin1), step(v.odd * cos2) + step(v.even * sin2)};
    if constexpr (interleaved) {
      store_pairs(out + 2 * (first + i), y, n);
    } else {
      store(out + first + i, y.even, n);
      store(out + half + first + i, y.odd, n);
    }
  });
}

template <class T>
void rotate_token(const Rotation& r, const Angles& angles, const Heads* sides, int64_t batch, int64_t token) {
  const int64_t half = r.rotary_dim / 2, tail = r.head_dim - r.rotary_dim;
  const int64_t second = angles.second * size_of(r.table_dtype);
  Block block;
  for (int64_t first = 0; first < half; first += kBlock) {
    const int64_t count = std::min(kBlock, half - first);
    fill<T>(block.cos1, angles.cos, first, count, r);
    fill<T>(block.sin1, angles.sin, first, count, r);
    fill<T>(block.cos2, angles.cos + second, first, count, r);
    fill<T>(block.sin2, angles.sin + second, first, count, r);
    for (int side = 0; side < 2; ++side) {
      const Heads& h = sides[side];
      const T* in = static_cast<const T*>(h.in) + batch * h.in_batch + token * h.in_token;
      T* out = static_cast<T*>(h.out) + batch * h.out_batch + token * h.out_token;
      for (int64_t head = 0; head < h.heads; ++head, in += h.in_head, out += h.out_head) {
        if (r.interleaved) {
          if (r.round_steps) rotate<T, true, true>(in, out, block, first, count, half);
          else rotate<T, true, false>(in, out, block, first, count, half);
        } else {
          if (r.round_steps) rotate<T, false, true>(in, out, block, first, count, half);
          else rotate<T, false, false>(in, out, block, first, count, half);
        }
      }
    }
  }
  if (tail == 0) return;
  for (int side = 0; side < 2; ++side) {
    const Heads& h = sides[side];
    const T* in = static_cast<const T*>(h.in) + batch * h.in_batch + token * h.in_token + r.rotary_dim;
    T* out = static_cast<T*>(h.out) + batch * h.out_batch + token * h.out_token + r.rotary_dim;
    for (int64_t head = 0; head < h.heads; ++head, in += h.in_head, out += h.out_head) std::memcpy(out, in, tail * sizeof(T));
  }
}

// angles_of(batch, token) gives the Angles of a token.
template <class AnglesOf>
void rotate_all(const Rotation& r, int64_t dtype, const Heads* sides, int64_t batches, int64_t tokens, const AnglesOf& angles_of) {
  const int64_t bytes = 2 * (sides[0].heads + sides[1].heads) * r.head_dim * size_of(dtype);
  for (int side = 0; side < 2; ++side) {
    expect_output(sides[side].out, batches * tokens * sides[side].heads * r.head_dim * size_of(dtype));
  }
  with_dtype(dtype, [&](auto* tag) {
    parallel_for(batches * tokens, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t batch = k / tokens, token = k % tokens;
        rotate_token<std::remove_pointer_t<decltype(tag)>>(r, angles_of(batch, token), sides, batch, token);
      }
    });
  });
}

struct Positions {
  const void* data;
  bool is_int32;

  int64_t operator()(int64_t token) const {
    return is_int32 ? static_cast<const int32_t*>(data)[token] : static_cast<const int64_t*>(data)[token];
  }

  // 1 + the index of the first that is not in 0 .. limit - 1, or 0.
  int64_t first_outside(int64_t tokens, int64_t limit) const {
    for (int64_t token = 0; token < tokens; ++token) {
      if (static_cast<uint64_t>((*this)(token)) >= static_cast<uint64_t>(limit)) return token + 1;
    }
    return 0;
  }
};

Rotation read_rotation(Reader& in) {
  Rotation r{};
  r.rotary_dim = in.i();
  r.head_dim = in.i();
  r.table_dtype = in.i();
  r.interleaved = in.i();
  r.round_table = in.i();
  r.round_steps = in.i();
  return r;
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// dtype, rotary_dim, head_dim, table_dtype, interleaved, round_table, round_steps, positions, positions_are_int32, tokens,
// table, table_rows, table_stride, then for query and key: in, token stride, head stride, out, heads
// -> 0, or 1 + the index of the first position outside the table (then nothing is written).
//
// Each table row is [cos | sin], rotary_dim / 2 each. Outputs are contiguous [tokens, heads, head_dim].
OPMUX_EXPORT int64_t opmux_rotary_embedding(const Arg* a) {
  Reader in(a);
  const int64_t dtype = in.i();
  const Rotation r = read_rotation(in);
  const void* positions = in.ptr<void>();
  const bool is_int32 = in.i();
  const int64_t tokens = in.i();
  const char* table = in.ptr<char>();
  const int64_t table_rows = in.i();
  const int64_t row_bytes = in.i() * size_of(r.table_dtype);
  Heads sides[2] = {};
  for (Heads& h : sides) {
    h.in = in.ptr<void>();
    h.in_token = in.i();
    h.in_head = in.i();
    h.out = in.ptr<void>();
    h.heads = in.i();
    h.out_token = h.heads * r.head_dim;
    h.out_head = r.head_dim;
  }
  const Positions position{positions, is_int32};
  if (const int64_t bad = position.first_outside(tokens, table_rows)) return bad;
  const int64_t sin_bytes = r.rotary_dim / 2 * size_of(r.table_dtype);
  rotate_all(r, dtype, sides, 1, tokens, [&](int64_t, int64_t token) {
    const char* row = table + position(token) * row_bytes;
    return Angles{row, row + sin_bytes, 0};
  });
  return 0;
}

// dtype, rotary_dim, head_dim, table_dtype, interleaved, round_table, round_steps, positions, positions_are_int32, tokens,
// position_limit, chunk, chunk_size, table, table_stride, then for query and key: in, token stride, head stride, out, heads
// -> 0, or 1 + the index of the first position outside 0 .. position_limit - 1 (then nothing is written).
//
// With j = position mod chunk: the query turned by the table's rows j, min(j + chunk, chunk_size),
// min(2 chunk - 1, chunk_size), j + chunk and j + chunk_size into [tokens, 5, heads, head_dim]; the key by row j.
OPMUX_EXPORT int64_t opmux_dual_chunk_rotary_embedding(const Arg* a) {
  Reader in(a);
  const int64_t dtype = in.i();
  const Rotation r = read_rotation(in);
  const void* data = in.ptr<void>();
  const bool is_int32 = in.i();
  const Positions position{data, is_int32};
  const int64_t tokens = in.i();
  const int64_t position_limit = in.i();
  const int64_t chunk = in.i();
  const int64_t chunk_size = in.i();
  const char* table = in.ptr<char>();
  const int64_t row_bytes = in.i() * size_of(r.table_dtype);
  Heads sides[2] = {};
  for (Heads& h : sides) {  // a token is a batch of its turns
    h.in = in.ptr<void>();
    h.in_batch = in.i();
    h.in_head = in.i();
    h.out = in.ptr<void>();
    h.heads = in.i();
    h.out_token = h.heads * r.head_dim;
    h.out_head = r.head_dim;
  }
  if (const int64_t bad = position.first_outside(tokens, position_limit)) return bad;
  constexpr int64_t kTurns = 5;
  const int64_t sin_bytes = r.rotary_dim / 2 * size_of(r.table_dtype);
  const auto angles_of = [&](int64_t token, int64_t turn) {
    const int64_t j = position(token) % chunk;
    const int64_t rows[kTurns] = {j, std::min(j + chunk, chunk_size), std::min(2 * chunk - 1, chunk_size), j + chunk,
                                  j + chunk_size};
    const char* row = table + rows[turn] * row_bytes;
    return Angles{row, row + sin_bytes, 0};
  };
  for (int side = 0; side < 2; ++side) {
    if (sides[side].heads == 0) continue;
    const int64_t turns = side == 0 ? kTurns : 1;
    Heads one[2] = {sides[side], {}};
    one[0].out_batch = turns * one[0].out_token;
    rotate_all(r, dtype, one, tokens, turns, angles_of);
  }
  return 0;
}

// dtype, rotary_dim, head_dim, table_dtype, interleaved, round_table, round_steps, batches, tokens, cos, sin,
// table batch stride, table token stride, second, then for query and key: in, its batch, token and head stride, out, its
// batch, token and head stride, heads -> 0.
//
// cos and sin have one row a token: rotary_dim / 2 wide (second = 0), or rotary_dim wide with the angles of a pair's second
// member from column `second` on.
OPMUX_EXPORT int64_t opmux_rotary_cos_sin(const Arg* a) {
  Reader in(a);
  const int64_t dtype = in.i();
  const Rotation r = read_rotation(in);
  const int64_t batches = in.i();
  const int64_t tokens = in.i();
  const char* cos = in.ptr<char>();
  const char* sin = in.ptr<char>();
  const int64_t batch_bytes = in.i() * size_of(r.table_dtype);
  const int64_t token_bytes = in.i() * size_of(r.table_dtype);
  const int64_t second = in.i();
  Heads sides[2] = {};
  for (Heads& h : sides) {
    h.in = in.ptr<void>();
    h.in_batch = in.i();
    h.in_token = in.i();
    h.in_head = in.i();
    h.out = in.ptr<void>();
    h.out_batch = in.i();
    h.out_token = in.i();
    h.out_head = in.i();
    h.heads = in.i();
  }
  rotate_all(r, dtype, sides, batches, tokens, [&](int64_t batch, int64_t token) {
    const int64_t offset = batch * batch_bytes + token * token_bytes;
    return Angles{cos + offset, sin + offset, second};
  });
  return 0;
}
