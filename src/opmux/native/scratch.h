// Working memory of a thread.
#pragma once

#include <cstdint>
#include <memory>

namespace opmux {

// Room for n elements, the thread's own, valid until its next call. It grows as needed and is kept for later calls; its
// contents are arbitrary.
template <class T>
T* scratch(int64_t n) {
  thread_local std::unique_ptr<T[]> memory;
  thread_local int64_t size = 0;
  if (n > size) {
    memory.reset(new T[n]);
    size = n;
  }
  return memory.get();
}

}  // namespace opmux
