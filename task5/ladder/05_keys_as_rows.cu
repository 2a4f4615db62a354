// Rung 5. Keys are the rows of the products, by wgmma, and TMA loads them.
// architectures: sm_90a cpu
//
//   S^T = K_j Q^T          64 keys x N rows of q, N = 8 to 64
//   O^T = V_j^T P^T        64 columns of V x N
//
// Keys are the rows of a product in the other rungs, too, where each warp has its own. wgmma has 64 rows, and four
// warps share a product. So
//   products      16 for 64 keys at head_dim 128, as many as a warp of those rungs has for its 16 keys of the 64, but
//                 no ldmatrix beside them: wgmma reads both operands from shared memory
//   registers     O^T of 8 rows takes 8 of them instead of 32, and up to 64 rows of q share a read of K and V
//   warps         are not apart any more: all have the same m_i, and the block has one part in the end
//   loads         one warp has TMA load what comes next, a page's keys of a tile in one instruction
// P^T has to pass through shared memory: it is the operand with rows of keys.
//
// block (160)   four warps that compute, and one that loads
// grid          where pairs are few, up to 16 blocks share one: a cluster, or several of them where one would leave
//               SMs idle. Several merge through global memory: the last one to come does. Where pairs are many, as many
//               blocks as fit at once, and each takes one pair after the other: the warp that loads does not stop
//
// The parts of a pair are the leaves of a tree: a block merges its own, a cluster its blocks', and the last cluster the
// clusters'. Batch-invariant, the keys are cut into as many parts as a sequence alone has blocks, however many there
// are.
constexpr int WARPS = 4;
#include "dependent_launch.cuh"

#include "computing_warps.cuh"
#include "loading_warp.cuh"
#include "tensor_map.cuh"

template <typename T, int D, int N>
__global__ void __launch_bounds__(THREADS + 32, TWO_FIT<D, N> ? 2 : 1)
decode_kernel(const __grid_constant__ Arguments c) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& mem = *reinterpret_cast<Shared<D, N>*>(raw);
  if (threadIdx.x == THREADS) {
    tma_prefetch(&c.k_map), tma_prefetch(&c.v_map);
    for (int i = 0; i < c.buffers; ++i) mbarrier_init(&mem.full[i], 1), mbarrier_init(&mem.empty[i], WARPS);
    mbarrier_init(&mem.known, 1), mbarrier_init(&mem.received, 1);
    mbarrier_init_fence();
    const Item item(c, blockIdx.x, N);
    mbarrier_arrive_expect(&mem.received, received_bytes(min(N, c.a.rows - item.row_0), D, c.block_bits,
                                                         item.share & ((1 << c.block_bits) - 1)));
  }
  __syncwarp();
  start_in_cluster();
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) == WARPS) {
    Producer<D, N>(c, mem).run();
  } else {
    Consumer<T, D, N>{c, mem}.run();
  }
}

// ---- Host

template <typename T_, int D_, int N_>
struct Kernel {
  using T = T_;
  static constexpr int D = D_, N = N_;
};

template <typename T, int D, typename Use>
static int with_rows(int rows, Use use) {
  if (rows <= 8) return use(Kernel<T, D, 8>{});
  if (rows <= 16) return use(Kernel<T, D, 16>{});
  if constexpr (D <= 128) {
    if (rows > 32) return use(Kernel<T, D, 64>{});
  }
  return use(Kernel<T, D, 32>{});
}
template <typename T, typename Use>
static int with_head_dim(int head_dim, int rows, Use use) {
  if (head_dim == 64) return with_rows<T, 64>(rows, use);
  if (head_dim == 128) return with_rows<T, 128>(rows, use);
  return with_rows<T, 256>(rows, use);
}
template <typename Use>
static int with_kernel(int dtype, int head_dim, int rows, Use use) {
  if (dtype == FLOAT16) return with_head_dim<__half>(head_dim, rows, use);
  return with_head_dim<__nv_bfloat16>(head_dim, rows, use);
}

template <int D, int N>
static int buffers_of(int tiles) { return min(BUFFERS<D, N>, max(2 * tiles, Shared<D, N>::O_BUFFERS)); }
template <int D, int N>
static int bytes_of(int buffers) { return sizeof(Shared<D, N>) + buffers * Shared<D, N>::TILE; }

template <typename T, int D, int N>
static cudaError_t prepare() {
  constexpr auto kernel = decode_kernel<T, D, N>;
  if (cudaError_t error = allow_shared_memory<kernel, sizeof(Shared<D, N>) + BUFFERS<D, N> * Shared<D, N>::TILE>())
    return error;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return error;
  return prefer_shared_memory<kernel>();
}

static int bits_of(int power_of_two) { return power_of_two == 1 ? 0 : 1 + bits_of(power_of_two / 2); }

extern "C" int rows_of_a_pair(int dtype, int head_dim, int rows) {
  return with_kernel(dtype, head_dim, rows, [](auto is) { return decltype(is)::N; });
}
extern "C" int keys_of_a_tile(int dtype, int head_dim, int rows) {
  return with_kernel(dtype, head_dim, rows, [](auto is) { return Shared<decltype(is)::D, decltype(is)::N>::KEYS; });
}

// How many clusters of so many blocks the GPU holds at once, where each block has so many tiles at most.
extern "C" int clusters_at_once(int dtype, int head_dim, int rows, int blocks, int tiles) {
  return with_kernel(dtype, head_dim, rows, [=](auto is) {
    using K = decltype(is);
    if (prepare<typename K::T, K::D, K::N>()) return 0;
    return most_clusters(decode_kernel<typename K::T, K::D, K::N>, THREADS + 32,
                         bytes_of<K::D, K::N>(buffers_of<K::D, K::N>(tiles)), blocks);
  });
}

extern "C" cudaError_t decode(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                              const int* block_table, int max_pages, int window, int new_keys, int chunks,
                              float scale, float* partial, int slots, int* counters, int blocks, int dtype,
                              cudaStream_t stream) {
  Arguments c;
  c.a = make_decode(q, k, v, out, seqlens_k, leftpad_k, block_table, max_pages, window, new_keys, chunks, scale,
                    partial, slots, counters);
  return cudaError_t(with_kernel(dtype, q.sizes[3], c.a.rows, [&](auto is) -> int {
    using K = decltype(is);
    using T = typename K::T;
    constexpr int D = K::D, N = K::N, KEYS = Shared<D, N>::KEYS;
    if (cudaError_t error = prepare<T, D, N>()) return error;
    while (1 << c.a.tile_bits < KEYS) ++c.a.tile_bits;
    c.a.row_tiles = Divisor(ceil_div(c.a.rows, N));
    const int pairs = c.a.batch * c.a.kv_heads * c.a.row_tiles.d, of_a_pair = blocks / pairs;
    c.items = blocks, c.shares = Divisor(of_a_pair), c.pairs = Divisor(pairs / c.a.batch);
    int sms;
    if (cudaError_t error = count_sms(&sms)) return error;
    const int clusters = max(1, slots / pairs), of_a_cluster = of_a_pair / clusters;
    c.box_bits = 4;
    while (c.box_bits < c.a.tile_bits && (!block_table || k.sizes[1] % (2 << c.box_bits) == 0)) ++c.box_bits;
    const int grid = of_a_cluster > 1 ? blocks : min(blocks, TWO_FIT<D, N> ? 2 * sms : sms);
    c.buffers = buffers_of<D, N>(ceil_div(ceil_div(c.a.kv_len, KEYS), of_a_pair) * ceil_div(blocks, grid));
    c.block_bits = bits_of(of_a_cluster), c.a.cluster_bits = bits_of(clusters);
    c.part_bits = 0;
    while (c.pairs.d << (c.part_bits + 1) <= ALONE) ++c.part_bits;
    if (cudaError_t error = make_rows_map<T>(&c.k_map, k, 1 << c.box_bits, 64)) return error;
    if (cudaError_t error = make_rows_map<T>(&c.v_map, v, 1 << c.box_bits, 64)) return error;
    return launch_kernel<Arguments>(decode_kernel<T, D, N>, dim3(grid), THREADS + 32,
                                    bytes_of<D, N>(c.buffers), stream, c, of_a_cluster);
  }));
}
