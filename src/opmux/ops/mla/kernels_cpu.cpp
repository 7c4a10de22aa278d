// Multi-head latent attention: absorbed (in the latents' space, for few queries), on expanded keys and values (for many), and
// the write to the latent cache.
#include "../attention/attend.h"
#include "../linear/few_tokens.h"
#include "abi.h"
#include "threads.h"

namespace opmux {
namespace {

constexpr int64_t kTokenGroup = 8;  // whose sums the registers hold
constexpr int64_t kColumns = 128;   // of one piece

// Queries of one head and its rows of the up-projection: [P, L] of the keys, then [V, L] of the values.
template <class T>
struct Heads {
  const T* q;  // [T, N, P + R]
  const T* w;  // [N, P + V, L]
  int64_t tokens, heads, latent, rope, nope, value, q_token, q_head, w_row;

  const T* rows(int64_t head) const { return w + head * (nope + value) * w_row; }
};

// The columns [c, c + V vectors) of M tokens' q_nope W: out[m * out_stride + c] for q [M, P].
template <class T, int M, int V, class N>
inline void absorb_columns(const float* q, const T* w, int64_t w_row, int64_t size, T* out, int64_t out_stride, N lanes) {
  vf acc[M][V] = {};
  for (int64_t p = 0; p < size; ++p, w += w_row) {
    vf x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(w + v * kLanes, lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf each = splat(q[m * size + p]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] = fma(each, x[v], acc[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(out + m * out_stride + v * kLanes, acc[m][v], lanes);
  }
}

template <class T, int M>
void absorb_group(const float* q, const T* w, int64_t w_row, int64_t size, int64_t columns, T* out, int64_t out_stride) {
  constexpr int V = M <= 4 ? 4 : 2;
  int64_t c = 0;
  for (; c + V * kLanes <= columns; c += V * kLanes) absorb_columns<T, M, V>(q, w + c, w_row, size, out + c, out_stride, Full{});
  for_lanes(columns - c, [&](int64_t i, auto lanes) {
    absorb_columns<T, M, 1>(q, w + c + i, w_row, size, out + c + i, out_stride, lanes);
  });
}

// out [T, N, L + R]: every head's q_nope in the latents' space, then its q_rope.
template <class T>
void absorb(const Heads<T>& h, T* out) {
  const int64_t width = h.latent + h.rope, across = (h.latent + kColumns - 1) / kColumns;
  share(h.heads * across, [&](int64_t piece) {
    const int64_t head = piece / across, first = piece % across * kColumns, columns = std::min(kColumns, h.latent - first);
    static thread_local std::vector<float> q;
    q.resize(kTokenGroup * h.nope);
    for (int64_t t = 0; t < h.tokens;) {
      const int64_t group = std::min(kTokenGroup, h.tokens - t);
      for (int64_t m = 0; m < group; ++m) {
        const T* from = h.q + (t + m) * h.q_token + head * h.q_head;
        for_lanes(h.nope, [&](int64_t i, auto n) { store(q.data() + m * h.nope + i, load(from + i, n), n); });
        if (first > 0) continue;
        std::memcpy(out + ((t + m) * h.heads + head) * width + h.latent, from + h.nope, h.rope * sizeof(T));
      }
      const auto take = [&](auto m) {
        constexpr int M = decltype(m)::value;
        absorb_group<T, M>(q.data(), h.rows(head) + first, h.w_row, h.nope, columns, out + (t * h.heads + head) * width + first,
                           h.heads * width);
        t += M;
      };
      if (group == 8) take(std::integral_constant<int, 8>{});
      else if (group >= 4) take(std::integral_constant<int, 4>{});
      else if (group >= 2) take(std::integral_constant<int, 2>{});
      else take(std::integral_constant<int, 1>{});
    }
  });
}

// out [T, N, V] from sums of latents [T, N, L]: every head's rows of the values' up-projection.
template <class T>
void project(const Heads<T>& h, const T* sums, T* out) {
  using Token = typename Dot<T>::Token;
  constexpr int64_t kRows = 64, kTokens = 16;
  const int64_t across = (h.value + kRows - 1) / kRows;
  share(h.heads * across, [&](int64_t piece) {
    const int64_t head = piece / across, first = piece % across * kRows, rows = std::min(kRows, h.value - first);
    alignas(64) float products[kTokens * kRows];
    static thread_local std::vector<Token> converted;
    for (int64_t t = 0; t < h.tokens; t += kTokens) {
      const int64_t tokens = std::min(kTokens, h.tokens - t);
      const T* from = sums + (t * h.heads + head) * h.latent;
      const Token* x;
      int64_t stride = h.heads * h.latent;
      if constexpr (std::is_same_v<Token, T>) {
        x = from;
      } else {
        converted.resize(kTokens * h.latent);
        for (int64_t m = 0; m < tokens; ++m) {
          for_lanes(h.latent, [&](int64_t i, auto n) { store(converted.data() + m * h.latent + i, load(from + m * stride + i, n), n); });
        }
        x = converted.data(), stride = h.latent;
      }
      dots<T>(x, stride, tokens, h.rows(head) + (h.nope + first) * h.w_row, h.w_row, rows, h.latent, products, kRows);
      for (int64_t m = 0; m < tokens; ++m) {
        T* to = out + ((t + m) * h.heads + head) * h.value + first;
        for_lanes(rows, [&](int64_t i, auto n) { store(to + i, load(products + m * kRows + i, n), n); });
      }
    }
  });
}

// Whether every page that the sequences' keys lie in exists.
bool pages_exist(const int64_t* table, int64_t stride, int64_t page, const int64_t* lengths, int64_t keys, int64_t batch, int64_t pages) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = lengths ? std::min(lengths[b], keys) : keys;
    for (int64_t i = 0; i * page < length; ++i) {
      if (table[b * stride + i] < 0 || table[b * stride + i] >= pages) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace opmux

// The absorbed path. out [B, S, N, V] contiguous, q [B S, N, P + R], latents and rope keys, w [N, P + V, L], mask or null,
// lengths (int64 [B]) or null, table (int64 [B, pages of a sequence]) or null; B, S, most keys, N, L, R, P, V; strides of q
// (token, head), latents (sequence or page, token), rope keys (the same), w (row), table (sequence), mask (batch, head, query,
// key); tokens of a page, pages; scale, causal, mask kind, dtype code. Returns 1, having done nothing, for a page that does not
// exist.
OPMUX_EXPORT int64_t opmux_latent_absorbed(const Arg* arguments) {
  using namespace opmux;
  Reader in(arguments);
  void* out = in.ptr<void>();
  const void *q = in.ptr<void>(), *latents = in.ptr<void>(), *rope_keys = in.ptr<void>(), *w = in.ptr<void>(), *mask = in.ptr<void>();
  const auto *lengths = in.ptr<const int64_t>(), *table = in.ptr<const int64_t>();
  int64_t sizes[8], s[12];
  for (int64_t& n : sizes) n = in.i();
  for (int64_t& n : s) n = in.i();
  const int64_t page = in.i(), pages = in.i();
  const float scale = in.f();
  const int64_t causal = in.i(), mask_kind = in.i(), dtype = in.i();
  const auto [batch, queries, keys, heads, latent, rope, nope, value] = sizes;
  if (table && !pages_exist(table, s[7], page, lengths, keys, batch, pages)) return 1;
  const ReleaseGil gil(batch * queries * keys * heads * latent >= kReleaseGilBytes);
  with_dtype(dtype, [&, batch = batch, queries = queries, keys = keys, heads = heads, latent = latent, rope = rope, nope = nope,
                     value = value](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    const int64_t rows = batch * queries * heads, width = latent + rope;
    static thread_local std::vector<T> memory;
    memory.resize(rows * (width + latent));
    T *absorbed = memory.data(), *sums = absorbed + rows * width;
    const Heads<T> h{static_cast<const T*>(q), static_cast<const T*>(w), batch * queries, heads, latent, rope, nope, value, s[0], s[1], s[6]};
    absorb(h, absorbed);
    // One key head, which all query heads share; its values are the latents themselves.
    Attention<T> a{absorbed, static_cast<const T*>(latents), static_cast<const T*>(latents), sums,
                   batch, queries, keys, heads, 1, width, latent,
                   queries * heads * width, heads * width, width, s[2], s[3], 0, s[2], s[3], 0,
                   scale, 0.0f, causal, 0, lengths, static_cast<MaskKind>(mask_kind), mask, s[8], s[9], s[10], s[11]};
    a.tail = static_cast<const T*>(rope_keys), a.tail_size = rope, a.tail_batch = s[4], a.tail_token = s[5];
    a.table = table, a.table_stride = s[7], a.page = page;
    attend(a);
    project(h, sums, static_cast<T*>(out));
  });
  return 0;
}

// Attention on expanded keys. out [B, S, N, V] contiguous, lse (fp32 [B, S, N]) or null, q [B, S, N, P + R], keys [B, K, N, P],
// values [B, K, N, V], rope keys [B, K, R], mask or null; B, S, K, N, P, R, V; strides of q (batch, token, head), keys and values
// (batch, token, head), rope keys (batch, token), mask (batch, head, query, key); scale, causal, mask kind, dtype code.
OPMUX_EXPORT int64_t opmux_latent_expanded(const Arg* arguments) {
  using namespace opmux;
  Reader in(arguments);
  void* out = in.ptr<void>();
  float* lse = in.ptr<float>();
  const void *q = in.ptr<void>(), *k = in.ptr<void>(), *v = in.ptr<void>(), *rope_keys = in.ptr<void>(), *mask = in.ptr<void>();
  int64_t sizes[7], s[15];
  for (int64_t& n : sizes) n = in.i();
  for (int64_t& n : s) n = in.i();
  const float scale = in.f();
  const int64_t causal = in.i(), mask_kind = in.i(), dtype = in.i();
  const auto [batch, queries, keys, heads, nope, rope, value] = sizes;
  const ReleaseGil gil(batch * queries * keys * heads * (nope + rope + value) >= 16 * kReleaseGilBytes);
  with_dtype(dtype, [&, batch = batch, queries = queries, keys = keys, heads = heads, nope = nope, rope = rope,
                     value = value](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    Attention<T> a{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out),
                   batch, queries, keys, heads, heads, nope + rope, value,
                   s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8],
                   scale, 0.0f, causal, 0, nullptr, static_cast<MaskKind>(mask_kind), mask, s[11], s[12], s[13], s[14]};
    a.tail = static_cast<const T*>(rope_keys), a.tail_size = rope, a.tail_batch = s[9], a.tail_token = s[10];
    a.lse = lse;
    attend(a);
  });
  return 0;
}

// Writes row t, [latent | rope key], to slot slots[t] of a cache [pages, tokens of a page, L + R]; a negative slot takes nothing.
// cache, latents, rope keys, slots (int64); tokens, L, R, pages, tokens of a page; strides of the cache (page, token), latents and
// rope keys (token); bytes of an element. Returns the number of slots that do not exist; then nothing was written.
OPMUX_EXPORT int64_t opmux_latent_store(const Arg* arguments) {
  using namespace opmux;
  Reader in(arguments);
  char* cache = in.ptr<char>();
  const auto *latents = in.ptr<const char>(), *rope_keys = in.ptr<const char>();
  const auto* slots = in.ptr<const int64_t>();
  const int64_t tokens = in.i(), latent = in.i(), rope = in.i(), pages = in.i(), page = in.i();
  const int64_t cache_page = in.i(), cache_token = in.i(), latent_token = in.i(), rope_token = in.i(), bytes = in.i();
  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t) wrong += slots[t] >= pages * page;
  if (wrong) return wrong;
  parallel_for(tokens, 2 * (latent + rope) * bytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      char* row = cache + (slots[t] / page * cache_page + slots[t] % page * cache_token) * bytes;
      std::memcpy(row, latents + t * latent_token * bytes, latent * bytes);
      std::memcpy(row + latent * bytes, rope_keys + t * rope_token * bytes, rope * bytes);
    }
  });
  return 0;
}
