// Experts of an MoE layer: the tokens of each expert are gathered, and the products of all experts run as pieces of a few
// weight rows, so that a weight is read from memory once, for all tokens of its expert.
//
// As linear: fp32 sums, the bias added there, one rounding to the storage type for each product. Between the products lies
// the activation, in fp32 from the rounded first product, rounded once.
#include <cstdlib>
#include <optional>
#include <vector>

#include "../linear/few_tokens.h"
#include "../linear/many_tokens.h"
#include "abi.h"
#include "threads.h"
#include "vec_math.h"

namespace opmux {
namespace {

enum Kind : int64_t { Silu = 0, Gelu = 1, GeluTanh = 2, Relu2 = 3, SwigluOAI = 4 };  // KINDS in kernels_cpu.py

constexpr int64_t kTokenGroup = 16;        // tokens whose sums a piece of dot products keeps at a time
constexpr int64_t kPieceBytes = 32 << 10;  // of weights: about 1 us
constexpr int64_t kMaxPieceRows = 256;

// The expert here that a slot goes to, or -1.
struct Ids {
  const void* ids;
  bool wide;  // int64
  const int32_t* map;
  int64_t mapped, experts;

  static Ids read(Reader& in) {
    Ids r{};
    r.ids = in.ptr<void>(), r.wide = in.i() != 0, r.map = in.ptr<int32_t>(), r.mapped = in.i();
    return r;
  }

  int64_t expert(int64_t slot) const {
    int64_t id = wide ? static_cast<const int64_t*>(ids)[slot] : static_cast<const int32_t*>(ids)[slot];
    if (map) id = id >= 0 && id < mapped ? map[id] : -1;
    return id >= 0 && id < experts ? id : -1;
  }
};

// Slots by expert: those of expert e are slot[first[e]] .. slot[first[e + 1] - 1], in rising order.
struct Sorted {
  std::vector<int64_t> first, slot;

  Sorted(const Ids& ids, int64_t slots) : first(ids.experts + 1), slot() {
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t e = ids.expert(s);
      if (e >= 0) ++first[e + 1];
    }
    for (int64_t e = 0; e < ids.experts; ++e) first[e + 1] += first[e];
    slot.resize(first.back());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t e = ids.expert(s);
      if (e >= 0) slot[next[e]++] = s;
    }
  }

  int64_t experts() const { return static_cast<int64_t>(first.size()) - 1; }
  int64_t tokens(int64_t e) const { return first[e + 1] - first[e]; }
};

// Memory of a call, at a multiple of a cache line. The calling thread keeps it for its next call, unless it is large.
template <int kPurpose>
class Workspace {
 public:
  explicit Workspace(int64_t bytes) {
    if (memory().size < bytes) memory().resize(bytes);
  }
  ~Workspace() {
    if (memory().size > kKeptBytes) memory().resize(0);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  template <class T>
  T* as() const { return static_cast<T*>(memory().data); }

 private:
  static constexpr int64_t kKeptBytes = 16 << 20;

  struct Memory {
    ~Memory() { std::free(data); }
    void resize(int64_t bytes) {
      std::free(data);
      size = (bytes + 63) / 64 * 64;
      data = size ? std::aligned_alloc(64, size) : nullptr;
    }
    void* data = nullptr;
    int64_t size = 0;
  };

  static Memory& memory() {
    static thread_local Memory memory;
    return memory;
  }
};

template <class T>
struct Expert {
  const T* weights;
  int64_t expert_stride, row_stride;
  int64_t rows;       // of one product
  int64_t second;     // where the rows of the second product begin, in elements; 0: there is none
  int64_t in;
};

// Pieces of the products: weight rows [first, first + rows) of one expert.
struct Piece { int64_t expert, first, rows; };

#if defined(__AVX512BF16__)

constexpr int64_t kPieceSteps = 60'000;  // of vector multiply-adds: about 15 us
constexpr int64_t kPanelRows = 48;       // a multiple of every tile height and of 16
constexpr int64_t kPanelBytes = 512 << 10;

// Whether dot products are faster than panels for an expert's tokens; linear's rule.
bool few_tokens(int64_t tokens, int64_t in) { return tokens <= 4 || (tokens <= 8 && tokens * in <= 20'480); }

// Tokens of one expert, packed.
struct Panel { int64_t expert, first, tokens, vectors; uint32_t* data; };

template <class Body>
void with_vectors(int64_t vectors, const Body& body) {
  if (vectors == 1) body(std::integral_constant<int, 1>{});
  else if (vectors == 2) body(std::integral_constant<int, 2>{});
  else if (vectors == 3) body(std::integral_constant<int, 3>{});
  else body(std::integral_constant<int, 4>{});
}

// The panels of experts with many tokens; panel_of[e] .. panel_of[e + 1] are those of expert e.
struct Panels {
  std::vector<Panel> all;
  std::vector<int64_t> panel_of;
  std::optional<Workspace<0>> memory;

  Panels(const Sorted& sorted, const bf16* tokens, int64_t stride, int64_t in) : panel_of(1) {
    int64_t lanes = 64;  // panels that fit into the second-level cache: fewer lanes for long rows
    while (lanes > 16 && lanes * in * 2 > kPanelBytes) lanes /= 2;
    const int64_t steps = (in + 1) / 2;
    int64_t words = 0;
    for (int64_t e = 0; e < sorted.experts(); ++e) {
      const int64_t n = sorted.tokens(e);
      for (int64_t m = 0; m < n && !few_tokens(n, in); m += lanes) {
        const int64_t count = std::min(lanes, n - m);
        all.push_back({e, sorted.first[e] + m, count, (count + 15) / 16, nullptr});
        words += steps * all.back().vectors * 16;
      }
      panel_of.push_back(static_cast<int64_t>(all.size()));
    }
    memory.emplace(words * 4);
    auto* data = memory->as<uint32_t>();
    for (Panel& p : all) p.data = data, data += steps * p.vectors * 16;
    share(static_cast<int64_t>(all.size()), [&](int64_t i) {
      const Panel& p = all[i];
      with_vectors(p.vectors, [&](auto mv) {
        pack_panel<decltype(mv)::value>(PairSteps{}, p.tokens, in, p.data, [&](int64_t m) { return tokens + (p.first + m) * stride; });
      });
    });
  }
};

template <int MV, class Finish>
void multiply_block(const Expert<bf16>& w, const Panel& p, const bf16* rows, int64_t first, int64_t n, const Finish& finish) {
  alignas(64) float product[kPanelRows * MV * kLanes], sums[MV * kLanes * kPanelRows], others[MV * kLanes * kPanelRows];
  multiply_panel<MV>(p.data, rows, w.row_stride, n, w.in, product);
  transpose_block<MV>(product, n, p.tokens, sums, kPanelRows);
  if (w.second) {
    multiply_panel<MV>(p.data, rows + w.second, w.row_stride, n, w.in, product);
    transpose_block<MV>(product, n, p.tokens, others, kPanelRows);
  }
  for (int64_t m = 0; m < p.tokens; ++m) finish(p.expert, p.first + m, first, n, sums + m * kPanelRows, others + m * kPanelRows);
}

#endif

// finish(expert, sorted token, first row, rows, sums, sums of the second product) for everything there is to multiply.
template <class T, class Finish>
void multiply(const Sorted& sorted, const Expert<T>& w, const typename Dot<T>::Token* tokens, int64_t stride, const Finish& finish) {
  const int64_t dot_rows = std::clamp<int64_t>(kPieceBytes / std::max<int64_t>(w.in * sizeof(T), 1) / 8 * 8, 8, kMaxPieceRows);
#if defined(__AVX512BF16__)
  const auto panels = [&] {
    if constexpr (std::is_same_v<T, bf16>) return Panels(sorted, tokens, stride, w.in);
    else return 0;
  }();
#endif
  std::vector<Piece> pieces;
  for (int64_t e = 0; e < sorted.experts(); ++e) {
    if (sorted.tokens(e) == 0) continue;
    int64_t rows = dot_rows;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      if (!few_tokens(sorted.tokens(e), w.in)) {
        const int64_t steps_per_row = (sorted.tokens(e) + 15) / 16 * w.in / 2 + 1;
        rows = kPanelRows * std::max<int64_t>(1, kPieceSteps / (kPanelRows * steps_per_row));
      }
    }
#endif
    for (int64_t r = 0; r < w.rows; r += rows) pieces.push_back({e, r, std::min(rows, w.rows - r)});
  }
  const auto body = [&](int64_t i) {
    const Piece& piece = pieces[i];
    const T* rows = w.weights + piece.expert * w.expert_stride + piece.first * w.row_stride;
    const int64_t from = sorted.first[piece.expert], count = sorted.tokens(piece.expert);
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      if (!few_tokens(count, w.in)) {
        for (int64_t r = 0; r < piece.rows; r += kPanelRows) {
          for (int64_t p = panels.panel_of[piece.expert]; p < panels.panel_of[piece.expert + 1]; ++p) {
            with_vectors(panels.all[p].vectors, [&](auto mv) {
              multiply_block<decltype(mv)::value>(w, panels.all[p], rows + r * w.row_stride, piece.first + r,
                                                  std::min(kPanelRows, piece.rows - r), finish);
            });
          }
        }
        return;
      }
    }
#endif
    alignas(64) float sums[kTokenGroup * kMaxPieceRows], others[kTokenGroup * kMaxPieceRows];
    for (int64_t m = 0; m < count; m += kTokenGroup) {
      const int64_t n = std::min(kTokenGroup, count - m);
      const auto* x = tokens + (from + m) * stride;
      dots<T>(x, stride, n, rows, w.row_stride, piece.rows, w.in, sums, kMaxPieceRows);
      if (w.second) dots<T>(x, stride, n, rows + w.second, w.row_stride, piece.rows, w.in, others, kMaxPieceRows);
      for (int64_t t = 0; t < n; ++t) {
        finish(piece.expert, from + m + t, piece.first, piece.rows, sums + t * kMaxPieceRows, others + t * kMaxPieceRows);
      }
    }
  };
  const auto n = static_cast<int64_t>(pieces.size());
  if (n * kPieceBytes < kSerialBytes) {
    for (int64_t i = 0; i < n; ++i) body(i);
  } else {
    share(n, body);
  }
}

struct Activation {
  int64_t kind;
  bool gated, interleaved;
  float alpha, limit;

  vf operator()(vf gate, vf up) const {
    switch (kind) {
      case Silu: gate = gate / (1.0f + exp(-gate)); break;
      case Gelu: gate = gate * normal_cdf(gate); break;
      case GeluTanh: {
        const vf u = gate * 0.7978845608f * (1.0f + 0.044715f * (gate * gate));
        gate = gate / (1.0f + exp(-2.0f * u));
        break;
      }
      case Relu2: gate = gate < 0.0f ? vf{} : gate * gate; break;
      default:  // comparisons are false for NaN, which stays
        gate = gate > limit ? splat(limit) : gate;
        up = up > limit ? splat(limit) : up;
        up = (up < -limit ? splat(-limit) : up) + 1.0f;
        gate = gate * sigmoid(alpha * gate);
    }
    return gated ? gate * up : gate;
  }
};

template <class T>
struct Call {
  T* y;
  const T* x;
  int64_t x_stride;
  const float* input_weights;
  Ids ids;
  int64_t tokens, top_k, hidden, inner;
  const T *w13, *b13, *w2, *b2;
  int64_t w13_expert, w13_row, w2_expert, w2_row;
  Activation activation;
  bool zero;
};

template <class T>
void run(const Call<T>& c) {
  using Token = typename Dot<T>::Token;
  const Sorted sorted(c.ids, c.tokens * c.top_k);
  const auto slots = static_cast<int64_t>(sorted.slot.size());
  if (c.zero && slots < c.tokens * c.top_k) {
    for (int64_t s = 0; s < c.tokens * c.top_k; ++s) {
      if (c.ids.expert(s) < 0) std::memset(static_cast<void*>(c.y + s * c.hidden), 0, c.hidden * sizeof(T));
    }
  }
  if (slots == 0 || c.hidden == 0) return;

  // A step more than the width: rows that lie a multiple of 4 KB apart evict each other from the first-level cache.
  const int64_t stride = (c.hidden + Dot<T>::kStep) / 32 * 32 + 32, inner_stride = (c.inner + Dot<T>::kStep) / 32 * 32 + 32;
  const Workspace<1> gathered(slots * stride * sizeof(Token));
  const Workspace<2> hidden_states(slots * inner_stride * sizeof(Token));
  auto* tokens = gathered.as<Token>();
  auto* between = hidden_states.as<Token>();
  parallel_for(slots, 2 * c.hidden * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t slot = sorted.slot[p];
      const T* from = c.x + slot / c.top_k * c.x_stride;
      Token* to = tokens + p * stride;
      if (c.input_weights) {
        const float weight = c.input_weights[slot];
        for_lanes(c.hidden, [&](int64_t i, auto n) { store(to + i, round_to<T>(load(from + i, n) * weight), n); });
      } else if constexpr (std::is_same_v<Token, T>) {
        std::memcpy(static_cast<void*>(to), from, c.hidden * sizeof(T));
      } else {
        for_lanes(c.hidden, [&](int64_t i, auto n) { store(to + i, load(from + i, n), n); });
      }
    }
  });

  // Gate and up as two products of one piece: apart by I rows, or alternating.
  const Activation& act = c.activation;
  const int64_t step = act.gated && act.interleaved ? 2 : 1;
  const int64_t second = !act.gated ? 0 : act.interleaved ? 1 : c.inner;
  const Expert<T> up{c.w13, c.w13_expert, step * c.w13_row, c.inner, second * c.w13_row, c.hidden};
  multiply<T>(sorted, up, tokens, stride, [&](int64_t e, int64_t p, int64_t first, int64_t rows, const float* gates, const float* ups) {
    const T* bias = c.b13 ? c.b13 + e * c.inner * (act.gated ? 2 : 1) : nullptr;
    Token* to = between + p * inner_stride + first;
    for_lanes(rows, [&](int64_t i, auto n) {
      vf gate = load(gates + i, n), other = act.gated ? load(ups + i, n) : vf{};
      if (bias && step == 2) {
        const Pairs pairs = load_pairs(bias + 2 * (first + i), n);
        gate += pairs.even, other += pairs.odd;
      } else if (bias) {
        gate += load(bias + first + i, n);
        if (act.gated) other += load(bias + c.inner + first + i, n);
      }
      store(to + i, round_to<T>(act(round_to<T>(gate), round_to<T>(other))), n);
    });
  });

  const Expert<T> down{c.w2, c.w2_expert, c.w2_row, c.hidden, 0, c.inner};
  multiply<T>(sorted, down, between, inner_stride, [&](int64_t e, int64_t p, int64_t first, int64_t rows, const float* sums, const float*) {
    T* to = c.y + sorted.slot[p] * c.hidden + first;
    const T* bias = c.b2 ? c.b2 + e * c.hidden + first : nullptr;
    for_lanes(rows, [&](int64_t i, auto n) {
      vf v = load(sums + i, n);
      if (bias) v += load(bias + i, n);
      store(to + i, v, n);
    });
  });
}

template <class T>
void combine(T* out, const T* y, const float* weights, const Ids& ids, int64_t tokens, int64_t top_k, int64_t hidden) {
  parallel_for(tokens, (top_k + 1) * hidden * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for_lanes(hidden, [&](int64_t i, auto n) {
        vf total = {};
        for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
          if (ids.ids && ids.expert(s) < 0) continue;
          total += load(y + s * hidden + i, n) * (weights ? weights[s] : 1.0f);
        }
        store(out + t * hidden + i, total, n);
      });
    }
  });
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// y [tokens, k, hidden] contiguous, x and its row stride, fp32 weights [tokens, k] for the input or null, ids [tokens, k],
// whether they are int64, expert map (int32) or null and its length, tokens, k, hidden, inner, experts; w13: address, strides
// of experts and rows, bias [experts, rows] or null; w2 likewise; activation, gated, interleaved, alpha, limit; whether rows
// of y without an expert are zeroed or left alone; dtype code -> 0.
OPMUX_EXPORT int64_t opmux_moe_experts(const Arg* a) {
  Reader in(a);
  void* y = in.ptr<void>();
  const void* x = in.ptr<void>();
  const int64_t x_stride = in.i();
  const float* input_weights = in.ptr<float>();
  Ids ids = Ids::read(in);
  const int64_t tokens = in.i(), top_k = in.i(), hidden = in.i(), inner = in.i();
  ids.experts = in.i();
  const void* w13 = in.ptr<void>();
  const int64_t w13_expert = in.i(), w13_row = in.i();
  const void* b13 = in.ptr<void>();
  const void* w2 = in.ptr<void>();
  const int64_t w2_expert = in.i(), w2_row = in.i();
  const void* b2 = in.ptr<void>();
  Activation activation{};
  activation.kind = in.i(), activation.gated = in.i() != 0, activation.interleaved = in.i() != 0;
  activation.alpha = in.f(), activation.limit = in.f();
  const bool zero = in.i() != 0;
  const ReleaseGil gil(std::min(tokens * top_k, ids.experts) * hidden * inner * 4 >= kReleaseGilBytes);
  with_dtype(in.i(), [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    run(Call<T>{static_cast<T*>(y), static_cast<const T*>(x), x_stride, input_weights, ids, tokens, top_k, hidden, inner,
                static_cast<const T*>(w13), static_cast<const T*>(b13), static_cast<const T*>(w2), static_cast<const T*>(b2),
                w13_expert, w13_row, w2_expert, w2_row, activation, zero});
  });
  return 0;
}

// out [tokens, hidden], y [tokens, k, hidden], fp32 weights or null for ones, ids (as above, or null: every row counts), whether
// int64, map, its length, experts, tokens, k, hidden, dtype code -> 0. Rows of y without an expert are not read.
OPMUX_EXPORT int64_t opmux_moe_combine(const Arg* a) {
  Reader in(a);
  void* out = in.ptr<void>();
  const void* y = in.ptr<void>();
  const float* weights = in.ptr<float>();
  Ids ids = Ids::read(in);
  ids.experts = in.i();
  const int64_t tokens = in.i(), top_k = in.i(), hidden = in.i();
  with_dtype(in.i(), [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    combine(static_cast<T*>(out), static_cast<const T*>(y), weights, ids, tokens, top_k, hidden);
  });
  return 0;
}
