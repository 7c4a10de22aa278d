// softmax(q k^T * scale) v for grouped heads, causal or not, with a key cache, sliding window, soft cap and mask.
#include "abi.h"
#include "block.h"
#include "pool.h"
#include "threads.h"

namespace opmux {
namespace {

// Keys of one piece where there are too few blocks of rows for the threads (decoding): about 10 us.
constexpr int64_t kSplitKeys = 4 * kKeys;
// Blocks for which keys are never split: enough for any number of threads to share evenly.
constexpr int64_t kManyBlocks = 64;

template <class T>
void attend(const Attention<T>& a) {
  const int64_t rows = a.queries * a.group();
  const int64_t per_head = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t blocks = a.batch * a.key_heads * per_head;
  const auto open = [&](Block<T>& block, int64_t i) {
    // The last rows see the most keys: they go first, so that the threads finish together.
    const int64_t first = (per_head - 1 - i / (a.batch * a.key_heads)) * kMaxRows, sequence = i % (a.batch * a.key_heads);
    block.open(a, sequence / a.key_heads, sequence % a.key_heads, first, std::min<int64_t>(kMaxRows, rows - first));
  };
  // Splits do not depend on the number of threads, so neither does the result.
  const int64_t splits = blocks >= kManyBlocks ? 1 : std::max<int64_t>(1, (a.keys + kSplitKeys - 1) / kSplitKeys);
  if (splits == 1) {
    const auto piece = [&](int64_t i) {
      static thread_local Block<T> block;
      int64_t begin, end;
      open(block, i);
      block.visible(a, begin, end);
      block.run(a, begin, end);
      block.close(a);
    };
    if (per_head == 1) share(blocks, piece);
    else share_long(blocks, piece);
    return;
  }
  static thread_local std::vector<float> buffer;
  const int64_t each = Block<T>::partial_floats(a);
  buffer.resize(blocks * splits * each);
  float* partial = buffer.data();
  share(blocks * splits, [&](int64_t p) {
    static thread_local Block<T> block;
    int64_t begin, end;
    open(block, p / splits);
    block.visible(a, begin, end);
    const int64_t at = p % splits * kSplitKeys;
    block.run(a, std::max(begin, at), std::min(end, at + kSplitKeys));
    block.save(a, partial + p * each);
  });
  static thread_local Block<T> block;
  for (int64_t i = 0; i < blocks; ++i) {
    open(block, i);
    for (int64_t s = 0; s < splits; ++s) block.merge(a, partial + (i * splits + s) * each);
    block.close(a);
  }
}

}  // namespace
}  // namespace opmux

// out [B, S, N, Dv] contiguous, q, k, v, mask or null, lengths (int64 [B]) or null; B, S, L, N, K, D, Dv; strides in elements
// of q (batch, token, head, element), k, v and the mask (batch, head, query, key); scale, cap (0: none), causal, window
// (0: none), mask kind (0 none, 1 bool, 2 additive in q's dtype), dtype code. Returns 1, having done nothing, if elements of
// a head are not adjacent.
OPMUX_EXPORT int64_t opmux_attention(const Arg* arguments) {
  using namespace opmux;
  Reader in(arguments);
  void* out = in.ptr<void>();
  const void *q = in.ptr<void>(), *k = in.ptr<void>(), *v = in.ptr<void>(), *mask = in.ptr<void>();
  const auto* lengths = in.ptr<const int64_t>();
  int64_t sizes[7], strides[16];
  for (int64_t& n : sizes) n = in.i();
  for (int64_t& n : strides) n = in.i();
  const float scale = in.f(), cap = in.f();
  const int64_t causal = in.i(), window = in.i(), mask_kind = in.i(), dtype = in.i();
  const auto [batch, queries, keys, heads, key_heads, size, value_size] = sizes;
  if (batch * queries * heads * value_size == 0) return 0;
  if ((strides[3] != 1 && size > 1) || (strides[7] != 1 && size > 1) || (strides[11] != 1 && value_size > 1)) return 1;
  const ReleaseGil gil(batch * queries * keys * heads * (size + value_size) >= 16 * kReleaseGilBytes);
  with_dtype(dtype, [&, batch = batch, queries = queries, keys = keys, heads = heads, key_heads = key_heads, size = size,
                     value_size = value_size](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    const auto* s = strides;
    attend(Attention<T>{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out),
                        batch, queries, keys, heads, key_heads, size, value_size,
                        s[0], s[1], s[2], s[4], s[5], s[6], s[8], s[9], s[10],
                        scale, cap, causal, window, lengths, static_cast<MaskKind>(mask_kind), mask,
                        s[12], s[13], s[14], s[15]});
  });
  return 0;
}
