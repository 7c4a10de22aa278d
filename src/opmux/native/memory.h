// Hints to the operating system about large outputs.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace opmux {

// Call before writing a freshly allocated output. Large ones come as pages that the kernel maps one by one while they are
// written, which takes longer than computing them; asking for huge pages makes it 512 times fewer.
inline void expect_output(void* p, int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t kLarge = 8 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kLarge) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kPage - 1) & -kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes) & -kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)p, (void)bytes;
#endif
}

}  // namespace opmux
