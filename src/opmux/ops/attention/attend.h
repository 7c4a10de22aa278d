// The loop of attention over blocks of query rows, shared by the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "block.h"
#include "pool.h"
#include "threads.h"

namespace opmux {

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

}  // namespace opmux
