// Which sequence has an item, where long sequences come first. A warp holds up to 128 sequences.
// architectures: sm_90a cpu
#include "../../../task5/ladder/longest_first.cuh"

__global__ void find_items(const float* shares, const int* cut, const int* items, int sequences, int* found) {
  int of[HELD], group[HELD];
  for (int i = 0; i < HELD; ++i) {
    const int sequence = threadIdx.x + 32 * i, inside = sequence < sequences;
    of[i] = inside ? items[sequence] : 0, group[i] = inside ? group_of(shares[sequence], cut[sequence]) : 0;
  }
  const Place place = place_of(blockIdx.x, of, group);
  if (threadIdx.x == 0) found[2 * blockIdx.x] = place.lane + 32 * place.i, found[2 * blockIdx.x + 1] = place.first;
}

__global__ void items_of_blocks(int at_once, int* found) { found[blockIdx.x] = one_of_two(blockIdx.x, at_once); }

extern "C" cudaError_t halves(int blocks, int at_once, int* found, cudaStream_t stream) {
  items_of_blocks<<<blocks, 1, 0, stream>>>(at_once, found);
  return cudaGetLastError();
}
extern "C" cudaError_t find(const float* shares, const int* cut, const int* items, int sequences, int total, int* found,
                            cudaStream_t stream) {
  find_items<<<total, 32, 0, stream>>>(shares, cut, items, sequences, found);
  return cudaGetLastError();
}
