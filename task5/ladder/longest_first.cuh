// Which item of a grid is which sequence's, where long sequences come first: of blocks that have one item after the
// other, the last ones are short then, and all end together. By one warp, whose lanes hold some sequences each.
#pragma once
#include <cuda_runtime.h>

#define DEVICE __device__ __forceinline__

constexpr int HELD = 4;     // sequences of a lane: lane + 32 i
constexpr int GROUPS = 16;  // of sequences about as long as each other

// The item of the nth of so many blocks that the GPU has room for at once, one for each SM. Two that follow each other
// are on neighbouring SMs, which share their way to memory. So the first half of the items have a block of each two:
// where the others have nothing to do, no two of the first need share it.
DEVICE int one_of_two(int n, int at_once) { return n < at_once ? n / 2 + n % 2 * ((at_once + 1) / 2) : n; }

// Of a sequence that has so many shares of all that there is to do, and whether several blocks have parts of it.
DEVICE int group_of(float shares, bool cut) { return cut ? 0 : GROUPS - 1 - int(fminf(8 * shares, GROUPS - 2)); }

struct Place {
  int lane, i, first;  // the sequence's, and the first of its items
};

// Of item n. Sequence i of a lane has items[i], and those of lower groups come first.
DEVICE Place place_of(int n, const int (&items)[HELD], const int (&group)[HELD]) {
  int its_group = 0, before = 0;
#pragma unroll 1
  for (int half = GROUPS / 2; half > 0; half /= 2) {
    int ahead = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) ahead += group[i] < its_group + half ? items[i] : 0;
    ahead = __reduce_add_sync(~0u, ahead);
    if (ahead <= n) its_group += half, before = ahead;
  }
  int of_group[HELD], here = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) here += of_group[i] = group[i] == its_group ? items[i] : 0;
  int up_to = here;  // this lane
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, step);
    if (threadIdx.x % 32 >= step) up_to += other;
  }
  Place place{min(__popc(__ballot_sync(~0u, before + up_to <= n)), 31), 0, before + up_to - here};
#pragma unroll
  for (int i = 0; i < HELD - 1; ++i) {
    if (place.i == i && place.first + of_group[i] <= n) place.first += of_group[i], ++place.i;
  }
  place.i = __shfl_sync(~0u, place.i, place.lane), place.first = __shfl_sync(~0u, place.first, place.lane);
  return place;
}
