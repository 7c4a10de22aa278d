// Patches of images and videos as the rows of a matrix.
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "memory.h"
#include "threads.h"

// x, its strides (batch, channel, depth, height; the last dimension is dense), out, batch, channels, patches in depth, height
// and width, patch depth, height and width, bytes of an element -> 0.
//
// out[b, d, h, w] is the patch at (d, h, w), flattened in the order channel, depth, height, width. Patches touch and do not
// overlap; what fills none at the ends of a dimension is left out.
OPMUX_EXPORT int64_t opmux_patches(const Arg* a) {
  using namespace opmux;
  Reader in(a);
  const char* x = in.ptr<char>();
  int64_t stride[4];
  for (int64_t& s : stride) s = in.i();
  char* out = in.ptr<char>();
  const int64_t batch = in.i(), channels = in.i();
  const int64_t depth = in.i(), height = in.i(), width = in.i();
  const int64_t patch_depth = in.i(), patch_height = in.i(), patch_width = in.i();
  const int64_t item = in.i();
  const int64_t run = patch_width * item;
  const int64_t patch = channels * patch_depth * patch_height * run;
  expect_output(out, batch * depth * height * width * patch);
  // A strip of patches side by side: its lines are read from end to end, its patches stay in the cache while they fill.
  parallel_for(batch * depth * height, 2 * width * patch, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t h = strip % height, d = strip / height % depth, b = strip / height / depth;
      char* to = out + strip * width * patch;
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t i = 0; i < patch_depth; ++i) {
          for (int64_t j = 0; j < patch_height; ++j, to += run) {
            const char* line = x + item * (b * stride[0] + c * stride[1] + (d * patch_depth + i) * stride[2] +
                                           (h * patch_height + j) * stride[3]);
            for (int64_t w = 0; w < width; ++w) std::memcpy(to + w * patch, line + w * run, run);
          }
        }
      }
    }
  });
  return 0;
}
