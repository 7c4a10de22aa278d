// softmax(q k^T * scale) v for grouped heads, causal or not, with a key cache, sliding window, soft cap and mask.
#include "abi.h"
#include "attend.h"
#include "threads.h"

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
