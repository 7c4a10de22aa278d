// The plain C interface between Python and the kernels: no torch header, no Python header, so that one build serves every
// torch and every Python.
//
// A kernel is `OPMUX_EXPORT int64_t opmux_<name>(const Arg* a)`. Python passes ints (addresses from data_ptr(), sizes, dtype
// codes, strides in elements) and floats; they arrive in the order of the call. Reader takes them in that order. The result
// goes back to Python as an int: 0, or what the kernel's comment says.
#pragma once

#include <cstdint>

union Arg {
  int64_t i;
  double f;
  void* p;
};

#define OPMUX_EXPORT extern "C" __attribute__((visibility("default")))

namespace opmux {

enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2 };  // DTYPE_CODE in loader.py

class Reader {
 public:
  explicit Reader(const Arg* a) : next_(a) {}
  int64_t i() { return next_++->i; }
  float f() { return static_cast<float>(next_++->f); }
  template <class T>
  T* ptr() { return static_cast<T*>(next_++->p); }

 private:
  const Arg* next_;
};

}  // namespace opmux
