// Calls one kernel of a library with arguments from standard input, so that a test can run another machine's library under
// an emulator. Arguments: library, kernel. Input: per argument a tag, then 8 bytes: 'i' an integer, 'f' a double, 'b' a size
// and that many bytes (a buffer). Output: the result in 8 bytes, then every buffer.
#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "abi.h"

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  auto* kernel = reinterpret_cast<int64_t (*)(const Arg*)>(dlsym(library, argv[2]));
  if (!kernel) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  std::vector<Arg> args;
  std::vector<std::unique_ptr<std::vector<char>>> buffers;
  for (int tag; (tag = std::getchar()) != EOF;) {
    Arg arg;
    if (std::fread(&arg, sizeof arg, 1, stdin) != 1) return 2;
    if (tag == 'b') {
      buffers.push_back(std::make_unique<std::vector<char>>(arg.i));
      if (std::fread(buffers.back()->data(), 1, arg.i, stdin) != static_cast<size_t>(arg.i)) return 2;
      arg.p = buffers.back()->data();
    }
    args.push_back(arg);
  }
  const int64_t result = kernel(args.data());
  std::fwrite(&result, sizeof result, 1, stdout);
  for (const auto& buffer : buffers) std::fwrite(buffer->data(), 1, buffer->size(), stdout);
}
