// The part of the compiled library that belongs to no op.
#include "abi.h"
#include "threads.h"

// save, restore -> 0. PyEval_SaveThread and PyEval_RestoreThread, for calls long enough to let other Python threads run.
OPMUX_EXPORT int64_t opmux_set_gil_functions(const Arg* a) {
  opmux::Reader in(a);
  opmux::ReleaseGil::save = reinterpret_cast<void* (*)()>(in.ptr<void>());
  opmux::ReleaseGil::restore = reinterpret_cast<void (*)(void*)>(in.ptr<void>());
  return 0;
}

// -> the number of threads that a large call will use.
OPMUX_EXPORT int64_t opmux_max_threads(const Arg*) { return omp_get_max_threads(); }
