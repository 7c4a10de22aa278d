// Attention of encoders: every token of a sequence sees every other one. Sequences are rows, or segments of packed tokens;
// scores may have a bias by the distance of two places in a grid.
#include <numeric>

#include "../attention/block.h"
#include "abi.h"
#include "pool.h"
#include "threads.h"

namespace opmux {
namespace {

// About a millisecond of one thread.
constexpr int64_t kLongProducts = 100'000'000;

struct Piece {
  int64_t sequence, head, first, rows;
};

template <class T>
void attend(const Attention<T>& a) {
  std::vector<int64_t> order(a.batch * a.segments);
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t b) { return a.sequence(b).keys; };
  // The longest first, so that the threads finish together.
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) { return length(one) > length(other); });
  std::vector<Piece> pieces;
  int64_t products = 0;
  for (const int64_t b : order) {
    const int64_t rows = a.sequence(b).queries * a.group();
    products += rows * a.key_heads * length(b) * (a.size + a.value_size);
    for (int64_t head = 0; head < a.key_heads; ++head) {
      for (int64_t first = 0; first < rows; first += kMaxRows) pieces.push_back({b, head, first, std::min<int64_t>(kMaxRows, rows - first)});
    }
  }
  const ReleaseGil gil(products >= kLongProducts);
  const auto run = [&](int64_t i) {
    static thread_local Block<T> block;
    const Piece& piece = pieces[i];
    int64_t begin, end;
    block.open(a, piece.sequence, piece.head, piece.first, piece.rows);
    block.visible(a, begin, end);
    block.run(a, begin, end);
    block.close(a);
  };
  const int64_t n = static_cast<int64_t>(pieces.size());
  if (products < kLongProducts) share(n, run);
  else share_long(n, run);
}

bool cover(const int64_t* bounds, int64_t segments, int64_t tokens) {
  if (bounds[0] != 0 || bounds[segments] != tokens) return false;
  return std::is_sorted(bounds, bounds + segments + 1);
}

}  // namespace
}  // namespace opmux

// out [B, S, N, D] contiguous; q, k, v; bounds (int64 [segments + 1]) or null; the grid's tables of rows and of columns, in q's
// dtype, contiguous, or null; B, S, N, K, D, segments, grid rows and columns (0: no bias); strides in elements of q, k, v (batch,
// token, head); scale, dtype code. Returns 1, having done nothing, if the bounds do not cover S in order.
OPMUX_EXPORT int64_t opmux_encoder_attention(const Arg* arguments) {
  using namespace opmux;
  Reader in(arguments);
  void* out = in.ptr<void>();
  const void *q = in.ptr<void>(), *k = in.ptr<void>(), *v = in.ptr<void>();
  const auto* bounds = in.ptr<const int64_t>();
  const void *row_table = in.ptr<void>(), *column_table = in.ptr<void>();
  int64_t sizes[8], s[9];
  for (int64_t& n : sizes) n = in.i();
  for (int64_t& n : s) n = in.i();
  const float scale = in.f();
  const int64_t dtype = in.i();
  const auto [batch, tokens, heads, key_heads, size, segments, grid_rows, grid_columns] = sizes;
  if (bounds && !cover(bounds, segments, tokens)) return 1;
  if (batch * tokens * heads * size == 0) return 0;
  with_dtype(dtype, [&, batch = batch, tokens = tokens, heads = heads, key_heads = key_heads, size = size, segments = segments,
                     grid_rows = grid_rows, grid_columns = grid_columns](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    Attention<T> a{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out),
                   batch, tokens, tokens, heads, key_heads, size, size,
                   s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8],
                   scale, 0.0f, 0, 0, nullptr, MaskKind::None, nullptr, 0, 0, 0, 0};
    a.bounds = bounds;
    a.segments = bounds ? segments : 1;
    a.row_table = static_cast<const T*>(row_table);
    a.column_table = static_cast<const T*>(column_table);
    a.grid_rows = grid_rows;
    a.grid_columns = grid_columns;
    attend(a);
  });
  return 0;
}
