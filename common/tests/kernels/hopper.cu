// Hopper's instructions within a block, for comparison with PyTorch, and what a kernel may not do with them.
// architectures: sm_90a cpu
//
// For the CPU layer's tests only: wgmma takes more sizes here than hopper.cuh has for a GPU.
#include "../../../task4/ladder/hopper.cuh"
#include "dtype.cuh"

constexpr int WARPGROUP = 128;  // threads

// Where element (row, column) of a tile of 128-byte rows is: TMA and wgmma swizzle its 16-byte chunks.
template <typename T>
DEVICE T& swizzled(T* tile, int row, int column) {
  constexpr int CHUNK = 16 / sizeof(T), ROW = 128 / sizeof(T);
  return tile[row * ROW + (column / CHUNK ^ row % 8) * CHUNK + column % CHUNK];
}

// ---- TMA: a box of a (batch, rows, heads, head_dim) tensor, as it is in shared memory
template <typename T>
__global__ void load_box(const __grid_constant__ CUtensorMap map, float* seen, int elements, int row, int part,
                         int head, int b) {
  extern __shared__ __align__(1024) uint8_t memory[];
  T* tile = reinterpret_cast<T*>(memory);
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&full, elements * sizeof(T));
    if (part == 0) tma_load(tile, &map, &full, row, head, b);
    if (part != 0) tma_load_box(tile, &map, &full, row, part, head, b);
  }
  mbarrier_wait(&full, 0);
  for (int i = threadIdx.x; i < elements; i += blockDim.x) seen[i] = to_float(tile[i]);
}
extern "C" cudaError_t run_load_box(int dtype, View x, float* seen, int box_rows, int row, int part, int head, int b,
                                    cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    CUtensorMap map;
    const int head_dim = x.sizes[3], elements = box_rows * head_dim;
    if (cudaError_t error = make_tensor_map<T>(&map, x.data, strides_of(x), x.sizes[0], x.sizes[1], x.sizes[2],
                                               head_dim, box_rows))
      return error;
    load_box<T><<<1, 64, elements * sizeof(T), stream>>>(map, seen, elements, row, part, head, b);
    return cudaGetLastError();
  });
}

// A map of its own: of a matrix whose rows are narrower than the box, and not swizzled.
extern "C" cudaError_t run_load_narrow(View x, float* seen, int box_rows, int row, cudaStream_t stream) {
  const cuuint32_t width = 32, box[5] = {width, cuuint32_t(box_rows), 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const cuuint64_t sizes[5] = {cuuint64_t(x.sizes[1]), cuuint64_t(x.sizes[0]), 1, 1, 1};
  const cuuint64_t pitches[4] = {cuuint64_t(x.strides[0]) * sizeof(float), 16, 16, 16};
  CUtensorMap map;
  if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, x.data, sizes, pitches, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return cudaErrorInvalidValue;
  const int elements = box_rows * int(width);
  load_box<float><<<1, 64, elements * sizeof(float), stream>>>(map, seen, elements, row, 0, 0, 0);
  return cudaGetLastError();
}

// ---- TMA stores: out = 2 x by boxes of 16 rows, through one buffer for loads and two for stores
template <typename T, int HEAD_DIM>
__global__ void store_boxes(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out, int boxes,
                            int waits) {
  constexpr int ROWS = 16, WIDTH = 128 / sizeof(T), PARTS = HEAD_DIM / WIDTH;
  __shared__ __align__(1024) T in[PARTS][ROWS][WIDTH], doubled[2][PARTS][ROWS][WIDTH];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int i = 0; i < boxes; ++i) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&full, sizeof(in));
      tma_load(in, &x, &full, i * ROWS, blockIdx.x, blockIdx.y);
      if (waits && i % 2 == 0) tma_store_wait();  // both buffers are read
    }
    mbarrier_wait(&full, i % 2);
    __syncthreads();
    const T* from = in[0][0];
    T* to = doubled[i % 2][0][0];
    for (int k = threadIdx.x; k < HEAD_DIM * ROWS; k += blockDim.x) to[k] = from_float<T>(2 * to_float(from[k]));
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) tma_store(&out, to, i * ROWS, blockIdx.x, blockIdx.y);
  }
  if (threadIdx.x == 0) tma_store_wait();
}
extern "C" cudaError_t run_store_boxes(int dtype, View x, View out, int waits, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int HEAD_DIM = 64;
    CUtensorMap maps[2];
    const int batch = x.sizes[0], rows = x.sizes[1], heads = x.sizes[2];
    for (int i = 0; i < 2; ++i) {
      const View& tensor = i == 0 ? x : out;
      if (cudaError_t error =
              make_tensor_map<T>(&maps[i], tensor.data, strides_of(tensor), batch, rows, heads, HEAD_DIM, 16))
        return error;
    }
    store_boxes<T, HEAD_DIM><<<dim3(heads, batch), 64, 0, stream>>>(maps[0], maps[1], ceil_div(rows, 16), waits);
    return cudaGetLastError();
  });
}

// ---- a ring of stages: a warp loads, two read. out (tiles, 512) = x
enum Ring {
  RING,
  NO_WAIT_FOR_FULL,
  WAITS_FOR_FULL_TWICE,
  ARRIVES_BEFORE_READING,
  NO_SYNCWARP
};

__global__ void ring(const float* x, float* out, int tiles, int bulk, int mistake,
                     const __grid_constant__ CUtensorMap map) {
  constexpr int STAGES = 3, READERS = 2, ELEMENTS = 16 * 32;
  __shared__ __align__(1024) float stages[STAGES][ELEMENTS];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], READERS);
    mbarrier_init_fence();
  }
  __syncthreads();
  int stage = 0, parity = 0;
  for (int i = 0; i < tiles; ++i) {
    if (warp == READERS && lane == 0) {
      mbarrier_wait(mistake == WAITS_FOR_FULL_TWICE ? &full[stage] : &empty[stage], parity ^ 1);
      mbarrier_arrive_expect(&full[stage], sizeof(stages[0]));
      if (bulk) {
        for (int part = 0; part < 2; ++part) {
          const int first = part * (ELEMENTS / 2);
          bulk_load(&stages[stage][first], x + i * ELEMENTS + first, ELEMENTS * 2, &full[stage]);  // @bulk load
        }
      } else {
        tma_load(stages[stage], &map, &full[stage], 16 * i, 0, 0);  // @tma load
      }
    }
    if (warp < READERS) {
      if (mistake != NO_WAIT_FOR_FULL) mbarrier_wait(&full[stage], parity);
      if (mistake == ARRIVES_BEFORE_READING && lane == 0) mbarrier_arrive(&empty[stage]);
      for (int k = threadIdx.x; k < ELEMENTS; k += 32 * READERS) {
        const int row = k / 32, column = k % 32;
        float* tile = stages[stage];
        out[i * ELEMENTS + k] = bulk ? tile[k] : swizzled(tile, row, column);  // @ring read
      }
      if (mistake != NO_SYNCWARP) __syncwarp();
      if (mistake != ARRIVES_BEFORE_READING && lane == 0) mbarrier_arrive(&empty[stage]);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}
extern "C" cudaError_t run_ring(const float* x, float* out, int tiles, int bulk, int mistake, cudaStream_t stream) {
  CUtensorMap map;
  const Strides strides = {16 * 32 * tiles, 32, 32};
  if (cudaError_t error = make_tensor_map<float>(&map, x, strides, 1, 16 * tiles, 1, 32, 16)) return error;
  ring<<<1, 96, 0, stream>>>(x, out, tiles, bulk, mistake, map);
  return cudaGetLastError();
}

// ---- wgmma: d (64 x N) = a (64 x 64) b (64 x N) + c, in two committed groups of 32 of the 64 products each
enum Product {
  PRODUCT,
  READS_BEFORE_WAITING,
  OVERWRITES_B,
  OVERWRITES_BY_TMA,
  LANES_LEAVE
};

template <typename T, int N, int TRANS_B, bool A_IN_REGISTERS>
__global__ void product(const float* a, const float* b, const float* c, float* d, int add, int mistake) {
  constexpr int K = 64, PARTS = TRANS_B ? (N + 63) / 64 : 1, ROWS = TRANS_B ? K : N;
  extern __shared__ __align__(1024) uint8_t memory[];
  T* A = reinterpret_cast<T*>(memory);
  T* B = A + 64 * K;
  __shared__ uint64_t full;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  if (thread == 0) mbarrier_init(&full, 1);
  for (int i = thread; i < 64 * K; i += WARPGROUP) swizzled(A, i / K, i % K) = from_float<T>(a[i]);
  for (int i = thread; i < K * N; i += WARPGROUP) {
    const int k = i / N, n = i % N;
    const T value = from_float<T>(b[i]);
    if (TRANS_B) {
      swizzled(B + n / 64 * ROWS * 64, k, n % 64) = value;
    } else {
      swizzled(B, n, k) = value;
    }
  }
  fence_async_proxy();
  __syncthreads();
  float sums[2][N / 2];
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    sums[0][i] = add ? c[row * N + column] : 1e30f;
    sums[1][i] = 1e30f;
  }
  if (mistake == LANES_LEAVE && lane >= 16) return;
  wgmma_fence();
  for (int group = 0; group < 2; ++group) {
    for (int half = 0; half < 2; ++half) {
      const int k = 2 * group + half;
      const uint32_t of_b = wgmma_descriptor(B, ROWS * 128) + (TRANS_B ? k * (16 * 128 / 16) : 2 * k);
      const int adds = half > 0 || (group == 0 && add);
      if constexpr (A_IN_REGISTERS) {
        uint32_t a_rows[4];
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * warp + g + i % 2 * 8, column = 16 * k + i / 2 * 8 + 2 * t;
          a_rows[i] = *reinterpret_cast<uint32_t*>(&swizzled(A, row, column));
        }
        Wgmma<T, N, TRANS_B>::run(sums[group], a_rows, of_b, adds);
      } else {
        Wgmma<T, N, TRANS_B>::run(sums[group], wgmma_descriptor(A) + 2 * k, of_b, adds);  // @wgmma
      }
    }
    wgmma_commit();
  }
  if (mistake == OVERWRITES_B) B[thread] = from_float<T>(0.0f);  // @overwrite
  if (mistake == OVERWRITES_BY_TMA && thread == 0) {
    mbarrier_arrive_expect(&full, 1024);
    bulk_load(B, a, 1024, &full);  // @overwrite by copy
  }
  if (mistake != READS_BEFORE_WAITING) wgmma_wait<1>();  // @wait for one
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    d[row * N + column] = sums[0][i];
  }
  wgmma_wait<0>();  // @wait for all
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    d[row * N + column] += sums[1][i];
  }
  if (mistake == OVERWRITES_BY_TMA) mbarrier_wait(&full, 0);
}

template <typename T, int N>
static void launch_product(const float* a, const float* b, const float* c, float* d, int trans_b, int a_in_registers,
                           int add, int mistake, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    const int bytes = 64 * 128 + (N + 63) / 64 * 64 * 128;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<1, WARPGROUP, bytes, stream>>>(a, b, c, d, add, mistake);
  };
  if (trans_b) run(a_in_registers ? product<T, N, 1, true> : product<T, N, 1, false>);
  if (!trans_b) run(a_in_registers ? product<T, N, 0, true> : product<T, N, 0, false>);
}
extern "C" cudaError_t run_product(int dtype, int N, const float* a, const float* b, const float* c, float* d,
                                   int trans_b, int a_in_registers, int add, int mistake, cudaStream_t stream) {
  const auto run = [&](auto of_half, auto of_bfloat) {
    (dtype == FLOAT16 ? of_half : of_bfloat)(a, b, c, d, trans_b, a_in_registers, add, mistake, stream);
  };
  if (N == 8) run(launch_product<__half, 8>, launch_product<__nv_bfloat16, 8>);
  if (N == 24) run(launch_product<__half, 24>, launch_product<__nv_bfloat16, 24>);
  if (N == 64) run(launch_product<__half, 64>, launch_product<__nv_bfloat16, 64>);
  if (N == 80) run(launch_product<__half, 80>, launch_product<__nv_bfloat16, 80>);
  if (N == 256) run(launch_product<__half, 256>, launch_product<__nv_bfloat16, 256>);
  return cudaGetLastError();
}

// ---- all of it: a warp loads tiles of a and b (64 and N rows of K values), a warpgroup multiplies.
// d (64 x N) = a b^T
template <typename T, int N>
__global__ void pipeline(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* d,
                         int K) {
  constexpr int STAGES = 2;
  __shared__ __align__(1024) T A[STAGES][64][64];
  __shared__ __align__(1024) T B[STAGES][N][64];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 4);
    mbarrier_init_fence();
  }
  __syncthreads();
  int stage = 0, parity = 0;
  if (warp == 4) {
    registers_give<40>();
    if (lane != 0) return;
    for (int part = 0; part < K / 64; ++part) {
      mbarrier_wait(&empty[stage], parity ^ 1);
      mbarrier_arrive_expect(&full[stage], sizeof(A[0]) + sizeof(B[0]));
      tma_load_box(A[stage], &a, &full[stage], 0, part, 0, 0);
      tma_load_box(B[stage], &b, &full[stage], 0, part, 0, 0);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  } else {
    registers_take<232>();
    float sums[N / 2];
    for (int part = 0; part < K / 64; ++part) {
      mbarrier_wait(&full[stage], parity);
      wgmma_fence();
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, N, 0>::run(sums, wgmma_descriptor(A[stage]) + 2 * k, wgmma_descriptor(B[stage]) + 2 * k,
                            part > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(&empty[stage]);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    for (int i = 0; i < N / 2; ++i)
      d[(16 * warp + g + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = sums[i];
  }
}
// a (1, 64, 1, K) and b (1, 32, 1, K). The maps' boxes are one 128-byte part wide.
extern "C" cudaError_t run_pipeline(View a, View b, float* d, cudaStream_t stream) {
  CUtensorMap maps[2];
  for (int i = 0; i < 2; ++i) {
    const View& x = i == 0 ? a : b;
    const cuuint64_t sizes[5] = {64, cuuint64_t(x.sizes[1]), cuuint64_t(x.sizes[3]) / 64, 1, 1};
    const cuuint64_t pitches[4] = {cuuint64_t(x.strides[1]) * 2, 128, 16, 16};
    const cuuint32_t box[5] = {64, cuuint32_t(x.sizes[1]), 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
    if (cuTensorMapEncodeTiled(&maps[i], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, x.data, sizes, pitches, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
      return cudaErrorInvalidValue;
  }
  pipeline<__nv_bfloat16, 32><<<1, 160, 0, stream>>>(maps[0], maps[1], d, int(a.sizes[3]));
  return cudaGetLastError();
}

// ---- stmatrix: four matrices, or the two first ones transposed
__global__ void store_fragments(const float* x, float* out, int transposed, int shift, int wait) {
  __shared__ __align__(16) __half matrices[4][8][8];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  uint32_t held[4];
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(x[i * 64 + g * 8 + 2 * t], x[i * 64 + g * 8 + 2 * t + 1]);
    held[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  const void* row_of_lane = matrices[lane / 8 % (transposed ? 2 : 4)][lane % 8];
  const uint32_t row = shared_address(row_of_lane) + shift;
  if (transposed) {
    store_transposed(row, held[0], held[1]);  // @stmatrix transposed
  } else {
    store_matrices(row, held);  // @stmatrix
  }
  if (wait) __syncwarp();
  const __half* first = matrices[0][0];
  for (int i = lane; i < (transposed ? 128 : 256); i += 32) out[i] = __half2float(first[i]);  // @read matrices
}
extern "C" cudaError_t run_stmatrix(const float* x, float* out, int transposed, int shift, int wait,
                                    cudaStream_t stream) {
  store_fragments<<<1, 32, 0, stream>>>(x, out, transposed, shift, wait);
  return cudaGetLastError();
}

// ---- data from two warps to two others and back, round after round; a fifth warp has no part in it
enum Way {
  NAMED_BARRIERS,
  MBARRIERS,
  NOTHING,
  GIVES_BACK_EARLY
};

__global__ void hand_over(const float* x, float* out, int rounds, int way) {
  __shared__ float box[64];
  __shared__ uint64_t filled, emptied;
  constexpr int FILLED = 1, EMPTIED = 2, AMONG_READERS = 3;
  const int thread = threadIdx.x;
  if (thread == 0) mbarrier_init(&filled, 64), mbarrier_init(&emptied, 64);
  __syncthreads();
  if (thread >= 128) return;
  const bool writes = thread < 64, named = way == NAMED_BARRIERS || way == GIVES_BACK_EARLY;
  for (int i = 0; i < rounds; ++i) {
    if (writes) {
      if (named && i > 0) barrier_sync(EMPTIED, 128);
      if (way == MBARRIERS && i > 0) mbarrier_wait(&emptied, (i - 1) % 2);
      box[thread] = x[i * 64 + thread];  // @box write
      if (named) barrier_arrive(FILLED, 128);
      if (way == MBARRIERS) mbarrier_arrive(&filled);
    } else {
      if (named) barrier_sync(FILLED, 128);
      if (way == MBARRIERS) mbarrier_wait(&filled, i % 2);
      if (way == GIVES_BACK_EARLY && i + 1 < rounds) barrier_arrive(EMPTIED, 128);
      out[i * 64 + thread - 64] = box[127 - thread];  // @box read
      if (named) barrier_sync(AMONG_READERS, 64);
      if (way == NAMED_BARRIERS && i + 1 < rounds) barrier_arrive(EMPTIED, 128);
      if (way == MBARRIERS) mbarrier_arrive(&emptied);
    }
  }
}
extern "C" cudaError_t run_hand_over(const float* x, float* out, int rounds, int way, cudaStream_t stream) {
  hand_over<<<1, 160, 0, stream>>>(x, out, rounds, way);
  return cudaGetLastError();
}

// ---- mistakes
enum Mistake {
  NONE,
  ARRIVE_WITHOUT_INIT,
  UNORDERED_INIT,
  WAIT_WITHOUT_INIT,
  COPY_WITHOUT_INIT,
  NOT_SHARED,
  COPY_TO_NO_MBARRIER,
  MISALIGNED_MBARRIER,
  NO_ARRIVALS,
  WRONG_PARITY,
  TOO_MANY_ARRIVALS,
  MISSING_ARRIVAL,
  MISSING_BYTES,
  SURPLUS_BYTES,
  MISALIGNED_TILE,
  MISALIGNED_BULK,
  BYTES_24,
  MISALIGNED_STORE,
  IN_FLIGHT_AT_END,
  BEYOND_THE_TENSOR,
  THREADS_DIFFER,
  THREADS_48,
  TOO_MANY_THREADS,
  BARRIER_16,
  NOT_ALL_COME
};

__global__ void mistakes(const float* x, float* out, const __grid_constant__ CUtensorMap map, int mistake) {
  __shared__ __align__(1024) float tile[16 * 32 + 32];
  __shared__ uint64_t barrier, another;
  const int thread = threadIdx.x, warp = thread / 32;
  const bool first = thread == 0;
  int arrivals = 1;
  if (mistake == NO_ARRIVALS) arrivals = 0;
  if (mistake == MISSING_ARRIVAL) arrivals = 2;
  if (first) mbarrier_init(&barrier, arrivals);  // @init
  if (mistake != UNORDERED_INIT) __syncthreads();
  uint64_t* of_arrival = &barrier;
  if (mistake == ARRIVE_WITHOUT_INIT) of_arrival = &another;
  if (mistake == NOT_SHARED) of_arrival = reinterpret_cast<uint64_t*>(out);
  if (mistake == MISALIGNED_MBARRIER) of_arrival = reinterpret_cast<uint64_t*>(tile + 1);
  const int bytes = 2048 + (mistake == MISSING_BYTES ? 1024 : 0) - (mistake == SURPLUS_BYTES ? 512 : 0);
  if (first) {
    mbarrier_arrive_expect(of_arrival, bytes);                    // @arrive
    if (mistake == TOO_MANY_ARRIVALS) mbarrier_arrive(&barrier);  // @arrive again
    uint64_t* counter = &barrier;
    if (mistake == COPY_WITHOUT_INIT) counter = &another;
    if (mistake == COPY_TO_NO_MBARRIER) counter = reinterpret_cast<uint64_t*>(out);
    const float* from = x + (mistake == MISALIGNED_BULK ? 1 : 0) + (mistake == BEYOND_THE_TENSOR ? 256 : 0);
    if (mistake == MISALIGNED_BULK || mistake == BYTES_24 || mistake == BEYOND_THE_TENSOR) {
      bulk_load(tile, from, mistake == BYTES_24 ? 24 : 2048, counter);  // @bulk
    } else {
      tma_load(tile + (mistake == MISALIGNED_TILE ? 16 : 0), &map, counter, 0, 0, 0);  // @load
    }
  }
  if (mistake == IN_FLIGHT_AT_END) return;
  mbarrier_wait(mistake == WAIT_WITHOUT_INIT ? &another : &barrier, mistake == WRONG_PARITY ? 2 : 0);  // @wait
  int threads = 128;
  if (mistake == THREADS_DIFFER && warp == 0) threads = 64;
  if (mistake == THREADS_48) threads = 48;
  if (mistake == TOO_MANY_THREADS) threads = 160;
  if (warp < 3 || mistake != NOT_ALL_COME) barrier_sync(mistake == BARRIER_16 ? 16 : 1, threads);  // @barrier
  if (first) tma_store(&map, tile + (mistake == MISALIGNED_STORE ? 4 : 0), 0, 0, 0);  // @store
  if (first) tma_store_wait();
  out[thread] = tile[thread];
}
extern "C" cudaError_t run_mistakes(float* x, float* out, int mistake, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t error = make_tensor_map<float>(&map, x, {512, 32, 32}, 1, 16, 1, 32, 16)) return error;
  mistakes<<<1, 128, 0, stream>>>(x, out, map, mistake);
  return cudaGetLastError();
}
