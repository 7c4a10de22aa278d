// Loops over rows, on as many threads as torch.set_num_threads says.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace opmux {

// Below this much memory traffic one thread is faster than waking a second one.
constexpr int64_t kSerialBytes = 128 << 10;
// Work is handed out in pieces of about this size: a thread that loses its core to another process delays one piece only.
constexpr int64_t kChunkBytes = 64 << 10;
// Above this the call is long enough for other Python threads to want the interpreter.
constexpr int64_t kReleaseGilBytes = 4 << 20;

// Lets other Python threads run for the duration of a long call. The loader sets the two functions
// (PyEval_SaveThread, PyEval_RestoreThread); without them the object does nothing.
class ReleaseGil {
 public:
  static inline void* (*save)() = nullptr;
  static inline void (*restore)(void*) = nullptr;

  explicit ReleaseGil(bool wanted) : state_(wanted && save ? save() : nullptr) {}
  ~ReleaseGil() { if (state_) restore(state_); }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  void* state_;
};

// Calls body(begin, end) over [0, n), serially or from several threads. `bytes` is the memory one item touches (or an
// equivalent amount of work).
template <class Body>
void parallel_for(int64_t n, int64_t bytes, const Body& body) {
  if (n <= 0) return;
  const int64_t total = n * std::max<int64_t>(bytes, 1);
  const int threads = total < kSerialBytes || n == 1 || omp_in_parallel() ? 1 : omp_get_max_threads();
  const ReleaseGil gil(total >= kReleaseGilBytes);
  if (threads == 1) {
    body(int64_t{0}, n);
    return;
  }
  const int64_t even = (n + threads - 1) / threads;
  const int64_t chunk = std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(bytes, 1), 1, even);
  share((n + chunk - 1) / chunk, [&](int64_t k) { body(k * chunk, std::min((k + 1) * chunk, n)); });
}

// Calls body(row, first column, columns) for pieces of a [rows, width] problem, so that one long row has several.
template <class Body>
void parallel_pieces(int64_t rows, int64_t width, int64_t element_bytes, const Body& body) {
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  parallel_for(rows * pieces, std::min(width, kPiece) * element_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t first = k % pieces * kPiece;
      body(k / pieces, first, std::min(kPiece, width - first));
    }
  });
}

}  // namespace opmux
