// Rows of a table, gathered by id.
#include <cstring>

#include "abi.h"
#include "memory.h"
#include "threads.h"

using namespace opmux;

// ids, ids_are_int32, count, table, table row stride in bytes, first_id, rows, out, row_bytes, zero_missing
// -> 0, or 1 + the index of the first id without a row (then nothing is written).
//
// out[k] = table[ids[k] - first_id], contiguous. The table holds ids first_id ... first_id + rows - 1; with zero_missing
// any other id gives a row of zeros.
OPMUX_EXPORT int64_t opmux_gather_rows(const Arg* a) {
  Reader in(a);
  const void* ids = in.ptr<void>();
  const bool is_int32 = in.i();
  const int64_t count = in.i();
  const char* table = in.ptr<char>();
  const int64_t stride = in.i();
  const int64_t first_id = in.i();
  const auto rows = static_cast<uint64_t>(in.i());
  char* out = in.ptr<char>();
  const int64_t row_bytes = in.i();
  const bool zero_missing = in.i();
  // Unsigned: an id before the first one wraps to a number above every row.
  const auto row_of = [&](int64_t k) -> uint64_t {
    const int64_t id = is_int32 ? static_cast<const int32_t*>(ids)[k] : static_cast<const int64_t*>(ids)[k];
    return static_cast<uint64_t>(id) - static_cast<uint64_t>(first_id);
  };
  if (!zero_missing) {
    for (int64_t k = 0; k < count; ++k) {
      if (row_of(k) >= rows) return k + 1;
    }
  }
  expect_output(out, count * row_bytes);
  parallel_for(count, 2 * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const uint64_t row = row_of(k);
      if (row < rows) std::memcpy(out + k * row_bytes, table + static_cast<int64_t>(row) * stride, row_bytes);
      else std::memset(out + k * row_bytes, 0, row_bytes);
    }
  });
  return 0;
}
