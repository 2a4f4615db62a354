// Clusters and cooperative launches, and what a kernel may not do with them.
// architectures: sm_90a cpu
//
// For the CPU layer's tests only: the barrier of a grid is written for the CPU.
#include "../../../task4/ladder/hopper.cuh"
#include "../../../task5/ladder/cluster_memory.cuh"

// Launched as clusters of this many blocks, or, with 0, cooperatively.
template <typename... Arguments, typename... Values>
static cudaError_t launch_together(void (*kernel)(Arguments...), dim3 grid, int threads, int cluster,
                                   cudaStream_t stream, const Values&... values) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cluster ? cudaLaunchAttributeClusterDimension : cudaLaunchAttributeCooperative;
  if (cluster) attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  if (!cluster) attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads);
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, values...);  // @launch
}

constexpr int MOST = 16;  // blocks of a cluster

DEVICE int number_of_block() { return blockIdx.x + gridDim.x * blockIdx.y; }

// ---- each block gives each block of its cluster a float4 or float2. out (rounds, blocks, size, 4)
enum Way {
  STORES,
  SENDS,
  LOADS
};

DEVICE float4 load_all(int rank, const float4* from) { return load_from(rank, from, true); }
DEVICE float2 load_all(int rank, const float2* from) { return load_from(rank, from); }

template <typename Vector>
__global__ void exchange(float* out, int size, int rounds, int way) {
  __shared__ __align__(16) Vector got[2][MOST];
  __shared__ uint64_t full;
  const int rank = blockIdx.x % size, thread = threadIdx.x, blocks = gridDim.x * gridDim.y;
  if (thread == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  start_in_cluster();
  wait_for_cluster();
  for (int i = 0; i < rounds; ++i) {
    Vector x = {};
    x.x = 100 * i + number_of_block(), x.y = thread;
    if (way == SENDS && thread == 0) mbarrier_arrive_expect(&full, size * sizeof(Vector));
    if (thread < size) {
      if (way == STORES) store_to(thread, &got[i % 2][rank], x);
      if (way == SENDS) send_to(thread, &got[i % 2][rank], x, &full);
      if (way == LOADS) got[i % 2][thread] = x;  // for block `thread`
    }
    if (way != SENDS) {
      arrive_in_cluster();
      wait_for_cluster();
    } else {
      mbarrier_wait(&full, i % 2);
    }
    for (int k = thread; k < size; k += blockDim.x) {
      float* to = out + ((i * blocks + number_of_block()) * size + k) * 2;
      const Vector x = way == LOADS ? load_all(k, &got[i % 2][rank]) : got[i % 2][k];
      to[0] = x.x, to[1] = x.y;
    }
    if (way != STORES) {  // nobody writes the round after the next before this one has been read
      arrive_in_cluster();
      wait_for_cluster();
    }
  }
}
extern "C" cudaError_t run_exchange(float* out, int size, int clusters, int y, int rounds, int way, int wide,
                                    cudaStream_t stream) {
  const dim3 grid(size * clusters, y);
  return launch_together(wide ? exchange<float4> : exchange<float2>, grid, 64, size, stream, out, size, rounds, way);
}

// ---- threads that have returned are not waited for: warp 1 of each block, and then all of the last block
__global__ void early_return(float* out, int size, int rounds) {
  __shared__ float2 got[MOST];
  const int rank = blockIdx.x % size, thread = threadIdx.x;
  arrive_in_cluster();
  wait_for_cluster();
  if (thread >= 32) return;
  for (int i = 0; i < rounds; ++i) {
    if (i == 1 && rank == size - 1) return;
    if (thread == 0 && (i == 0 || rank > 0)) store_to(0, &got[rank], float2{float(i), float(rank)});
    if (i > 0 && rank == 0 && thread == 0) got[0] = float2{float(i), 0.0f};
    arrive_in_cluster();
    wait_for_cluster();
  }
  if (rank == 0 && thread < size) out[blockIdx.x + thread] = got[thread].x;
}
extern "C" cudaError_t run_early_return(float* out, int size, int clusters, int rounds, cudaStream_t stream) {
  return launch_together(early_return, size * clusters, 64, size, stream, out, size, rounds);
}

// ---- mistakes of a cluster of four
enum Mistake {
  NONE,
  TO_AN_ENDED_BLOCK,
  RANK_4,
  RANK_BELOW_0,
  NOT_SHARED,
  MISALIGNED,
  OUT_OF_RANGE,
  SEND_WITHOUT_INIT,
  LOAD_OF_RANK_4,
  LOAD_OUT_OF_RANGE,
  FAILS,
  FAULTS,
  WAITS_FOR_EVER,
  SPINS,
  LOAD_OF_NOTHING
};

__global__ void mistakes(float* out, volatile int* go, int mistake) {
  __shared__ float4 got[4];
  __shared__ uint64_t full;
  const int rank = blockIdx.x % 4, thread = threadIdx.x;
  arrive_in_cluster();
  wait_for_cluster();
  if (mistake == TO_AN_ENDED_BLOCK && rank == 3) return;
  if (thread == 0 && rank == 1) {
    const float4 x = {1, 2, 3, 4};
    if (mistake == TO_AN_ENDED_BLOCK)
      for (;;) store_to(3, got, x);                                               // @to ended
    if (mistake == RANK_4) store_to(4, got, x);                                   // @to rank 4
    if (mistake == RANK_BELOW_0) store_to(-1, got, x);                            // @to rank -1
    if (mistake == NOT_SHARED) store_to(2, reinterpret_cast<float4*>(out), x);    // @to global
    if (mistake == MISALIGNED) store_to(2, reinterpret_cast<float4*>(&got[0].z), x);  // @to misaligned
    if (mistake == OUT_OF_RANGE) store_to(2, got + 4, x);                         // @to nothing
    if (mistake == SEND_WITHOUT_INIT) send_to(2, got, x, &full);                  // @send
    float4 y = {};
    if (mistake == LOAD_OF_RANK_4) y = load_from(4, got, true);                   // @from rank 4
    if (mistake == LOAD_OUT_OF_RANGE) y = load_from(2, got + 4, true);            // @from nowhere
    if (mistake == LOAD_OF_NOTHING) y = load_from(2, got, true);                  // @of nothing
    if (y.x == 1e30f) out[0] = y.x;
    if (mistake == FAILS) mbarrier_arrive(&full);                                 // @fails
    if (mistake == FAULTS) *reinterpret_cast<volatile int*>(8) = 1;               // @faults
    if (mistake == WAITS_FOR_EVER) {
      mbarrier_init(&full, 1);
      mbarrier_wait(&full, 0);  // @for ever
    }
    if (mistake == SPINS)
      while (*go == 0) {}  // @spins
  }
  arrive_in_cluster();
  wait_for_cluster();  // @all wait
  out[blockIdx.x * blockDim.x + thread] = 1.0f;
}
extern "C" cudaError_t run_mistakes(float* out, int* go, int mistake, cudaStream_t stream) {
  return launch_together(mistakes, 8, 64, 4, stream, out, go, mistake);
}

// ---- one warp waits for the cluster, the other for that warp
__global__ void half_waits(float* out) {
  const int thread = threadIdx.x;
  arrive_in_cluster();
  if (thread < 32) wait_for_cluster();  // @half waits
  barrier_sync(1, 64);
  out[blockIdx.x * blockDim.x + thread] = 1.0f;
}
extern "C" cudaError_t run_half_waits(float* out, int size, cudaStream_t stream) {
  return launch_together(half_waits, 4, 64, size, stream, out);
}

// ---- a launch of any configuration
__global__ void number_blocks(float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x;
}
extern "C" cudaError_t run_number_blocks(float* out, int blocks, int cluster, cudaStream_t stream) {
  return launch_together(number_blocks, blocks, 32, cluster, stream, out);
}

// ---- all blocks meet, round after round. out (rounds, blocks) is the sum of what all blocks wrote in the round
DEVICE void meet_all(int* counter, int target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
    int come = 0;
    while (come < target) {
      cuda_on_cpu::yield();  // @meets
      come = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
    }
    __threadfence();
  }
  __syncthreads();
}

__global__ void sums_of_all(float* partial, float* out, int* counter, int rounds, int absent) {
  __shared__ float all;
  const int blocks = gridDim.x;
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x == 0) partial[i * blocks + blockIdx.x] = float(i + 1) * blockIdx.x;
    if (int(blockIdx.x) == absent) return;
    meet_all(counter, (i + 1) * blocks);
    if (threadIdx.x == 0) {
      all = 0.0f;
      for (int k = 0; k < blocks; ++k) all += partial[i * blocks + k];
    }
    __syncthreads();
    if (threadIdx.x == 32) out[i * blocks + blockIdx.x] = all;
  }
}
extern "C" cudaError_t run_sums_of_all(float* partial, float* out, int* counter, int blocks, int rounds, int absent,
                                       cudaStream_t stream) {
  return launch_together(sums_of_all, blocks, 64, 0, stream, partial, out, counter, rounds, absent);
}
