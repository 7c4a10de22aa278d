// The requests of one call, as requests.py describes them: rows of packed tokens, and slots of a state.
#pragma once

#include <cstdint>

#include "abi.h"

namespace opmux {

struct Requests {
  int64_t count, length, tokens, slots;
  const int32_t* bounds;    // [count + 1], or null: `length` rows each
  const int32_t* indices;   // [count, window], or null: slot r
  const int32_t* old;       // [count], or null: no request has an initial state
  const int32_t* accepted;  // [count], or null
  int64_t window;

  // Rows are kept inside the tensor whatever the bounds say.
  int64_t at(int64_t r) const {
    if (!bounds) return r * length;
    return bounds[r] < 0 ? 0 : bounds[r] > tokens ? tokens : bounds[r];
  }
  int64_t start(int64_t r) const { return at(r); }
  int64_t end(int64_t r) const { return at(r + 1) < at(r) ? at(r) : at(r + 1); }
  int64_t slot(int64_t r, int64_t column) const { return indices ? indices[r * window + column] : r; }
  bool in_state(int64_t slot) const { return slot >= 0 && slot < slots; }
  bool padding(int64_t r) const { return slots && !in_state(slot(r, 0)); }
  bool has_state(int64_t r) const { return slots && old && old[r]; }
  int64_t offset(int64_t r) const { return accepted && accepted[r] > 1 ? accepted[r] - 1 : 0; }

  // The slot that a request starts from, or -1: from zero.
  int64_t first_slot(int64_t r) const {
    if (!has_state(r)) return -1;
    const int64_t column = offset(r);
    const int64_t from = slot(r, column < window ? column : window - 1);
    return in_state(from) ? from : -1;
  }
  // The slot that takes the state after token t of a request, or -1.
  int64_t slot_after(int64_t r, int64_t t) const {
    if (!slots) return -1;
    const int64_t n = end(r) - start(r);
    const bool each = window > 1 && n > 0 && n <= window;
    if (!each && t != n - 1) return -1;
    const int64_t to = slot(r, each ? t : 0);
    return in_state(to) ? to : -1;
  }
};

// Count, length or -1, tokens, slots (0: no state), window, and four addresses or null.
inline Requests read_requests(Reader& in) {
  Requests q{};
  q.count = in.i();
  q.length = in.i();
  q.tokens = in.i();
  q.slots = in.i();
  q.window = in.i();
  q.bounds = in.ptr<int32_t>();
  q.indices = in.ptr<int32_t>();
  q.old = in.ptr<int32_t>();
  q.accepted = in.ptr<int32_t>();
  return q;
}

// Calls zero(row) for the rows of padding, and those that belong to no request.
template <class Zero>
void for_rows_of_nobody(const Requests& q, const Zero& zero) {
  int64_t at = 0;
  for (int64_t r = 0; r < q.count; ++r) {
    for (; at < q.start(r); ++at) zero(at);
    if (q.padding(r)) for (int64_t t = q.start(r); t < q.end(r); ++t) zero(t);
    at = q.end(r) > at ? q.end(r) : at;
  }
  for (; at < q.tokens; ++at) zero(at);
}

}  // namespace opmux
