// The choice of experts, a row of logits at a time, in fp32: see GroupedTopk for the rules.
#include <cmath>
#include <limits>

#include "abi.h"
#include "scratch.h"
#include "threads.h"
#include "vec_math.h"

namespace opmux {
namespace {

enum Score : int64_t { Softmax = 0, Sigmoid = 1, SqrtSoftplus = 2 };  // SCORES in routing.py

constexpr float kLargest = std::numeric_limits<float>::max();

struct Rules {
  int64_t experts, top_k, groups, kept;
  bool renormalize;
  int64_t score;
  float scale;
};

// NaN counts as the lowest, infinities as the largest numbers there are.
vf bounded(vf x) {
  x = x == x ? x : splat(-kLargest);
  x = x > kLargest ? splat(kLargest) : x;
  return x < -kLargest ? splat(-kLargest) : x;
}

void scores_of(const float* logits, int64_t n, int64_t kind, float* scores) {
  if (kind == SqrtSoftplus) {
    for (int64_t e = 0; e < n; ++e) {
      const float x = logits[e];
      scores[e] = std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
    }
    return;
  }
  if (kind == Sigmoid) {
    for_lanes(n, [&](int64_t e, auto lanes) { store(scores + e, sigmoid(load(logits + e, lanes)), lanes); });
    return;
  }
  const float most = *std::max_element(logits, logits + n);
  for_lanes(n, [&](int64_t e, auto lanes) { store(scores + e, exp(load(logits + e, lanes) - most), lanes); });
  float total = 0.0f;
  for (int64_t e = 0; e < n; ++e) total += scores[e];
  for (int64_t e = 0; e < n; ++e) scores[e] /= total;
}

// Leaves the keys of the best groups and puts -infinity, below every key, in place of the others.
void keep_groups(float* key, const Rules& r, int best, float* worth) {
  const int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    float first = -kLargest, second = -kLargest;
    for (int64_t i = 0; i < size; ++i) {
      const float v = key[g * size + i];
      if (v > first) second = first, first = v;
      else if (v > second) second = v;
    }
    const float both = best == 2 && size > 1 ? first + second : first;
    worth[g] = std::min(std::max(both, -kLargest), kLargest);
  }
  const float excluded = -std::numeric_limits<float>::infinity(), taken = std::numeric_limits<float>::infinity();
  for (int64_t n = 0; n < r.kept; ++n) {
    int64_t at = -1;
    for (int64_t g = 0; g < r.groups; ++g) {
      if (worth[g] != taken && (at < 0 || worth[g] > worth[at])) at = g;
    }
    worth[at] = taken;
  }
  for (int64_t g = 0; g < r.groups; ++g) {
    if (worth[g] != taken) std::fill_n(key + g * size, size, excluded);
  }
}

void choose(float* logits, const float* bias, const Rules& r, float* scores, float* key, float* weights, int32_t* ids) {
  scores_of(logits, r.experts, r.score, scores);
  if (bias) {
    for_lanes(r.experts, [&](int64_t e, auto n) { store(key + e, bounded(load(scores + e, n) + load(bias + e, n)), n); });
  } else {
    std::copy_n(logits, r.experts, key);
  }
  if (r.kept < r.groups) keep_groups(key, r, bias ? 2 : 1, logits);  // the logits are no longer needed
  float total = 0.0f;
  for (int64_t j = 0; j < r.top_k; ++j) {
    vf most = splat(-std::numeric_limits<float>::infinity());
    int64_t e = 0;
    for (; e + kLanes <= r.experts; e += kLanes) {
      const vf v = load(key + e);
      most = v > most ? v : most;
    }
    float best = most[0];
    for (int k = 1; k < kLanes; ++k) best = std::max(best, most[k]);
    for (; e < r.experts; ++e) best = std::max(best, key[e]);
    int64_t at = 0;
    while (key[at] != best) ++at;
    ids[j] = static_cast<int32_t>(at);
    weights[j] = scores[at];
    total += scores[at];
    key[at] = -std::numeric_limits<float>::infinity();
  }
  const float factor = r.scale;
  const float divisor = r.renormalize && total > 0.0f ? total : 1.0f;
  for (int64_t j = 0; j < r.top_k; ++j) weights[j] = weights[j] / divisor * factor;
}

}  // namespace
}  // namespace opmux

using namespace opmux;

// weights [rows, k] fp32, ids [rows, k] int32, logits [rows, experts], their row stride and dtype, bias fp32 or null, rows,
// experts, k, groups, groups kept, renormalize, score, scale -> 0.
OPMUX_EXPORT int64_t opmux_grouped_topk(const Arg* a) {
  Reader in(a);
  float* weights = in.ptr<float>();
  int32_t* ids = in.ptr<int32_t>();
  const void* logits = in.ptr<void>();
  const int64_t stride = in.i(), dtype = in.i();
  const float* bias = in.ptr<float>();
  const int64_t rows = in.i();
  Rules r{};
  r.experts = in.i(), r.top_k = in.i(), r.groups = in.i(), r.kept = in.i();
  r.renormalize = in.i() != 0, r.score = in.i(), r.scale = in.f();
  with_dtype(dtype, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    parallel_for(rows, r.experts * (8 + r.top_k), [&](int64_t begin, int64_t end) {
      float* buffer = scratch<float>(3 * r.experts);
      for (int64_t row = begin; row < end; ++row) {
        const T* from = static_cast<const T*>(logits) + row * stride;
        for_lanes(r.experts, [&](int64_t e, auto n) { store(buffer + e, bounded(load(from + e, n)), n); });
        choose(buffer, bias, r, buffer + r.experts, buffer + 2 * r.experts, weights + row * r.top_k, ids + row * r.top_k);
      }
    });
  });
  return 0;
}
