// Rung 11, Hopper: TMA loads whole tiles, and wgmma multiplies them from shared memory.
// architectures: sm_90a cpu
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)     fp16 or bf16, sums in fp32
//   grid  (ceil(q_len / B_r) heads batch)      one block per Q_i; those of a head are neighbours: they share K, V in L2
//   block (256)                                two warpgroups: w has the rows 64 w ... 64 w + 63 of Q_i, all columns
//   head_dim 64, 128 or 256, scale above 0, pointers and strides multiples of 16 bytes: checked by the caller
//
//   line  8    S   = Q_i K_j^T                 wgmma, both operands from shared memory
//   line  9    m'  = max(m_i, rowmax(S))       four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j      wgmma, P from registers
//   line 12    O_i = diag(l_i)^-1 O_i          once, at the end
//
// Against rung 10, with the same tiles (128 x 64): nothing between memory and tensor cores passes through registers.
//   wgmma  one instruction of four warps multiplies 64 x B_c x 16; mma.sync multiplies 16 x 8 x 16 of one warp. The
//          tensor cores read K_j, V_j and Q_i from shared memory: no ldmatrix, no registers for fragments. A K_j or V_j
//          is read once per 64 rows instead of 32: at head_dim 128 a block of keys takes 768 wavefronts of shared
//          memory, in rung 10 1,536. wgmma runs while the warps go on: fence, issue, commit, and a wait where the
//          result is needed. In registers S, P and O_i have mma.sync's layouts: softmax does not change (warpgroup.cuh)
//   TMA    thread 0 loads a tile with one instruction: the tensor map, made by the host, holds sizes and strides. The
//          tile arrives in wgmma's swizzled layout, with zeros for rows past the end. An mbarrier counts its bytes, and
//          every reader waits for it. The other 255 threads have no part in loading
//   out    goes from registers to global memory, after four threads have exchanged values so that each stores 16 bytes
//
// What limits it: the two blocks of an SM fill each other's gaps, but in a block all warps wait for the slowest one
// after each block of keys. 128 registers per thread allow no more than 64 keys at a time, so reading Q_i takes as much
// of shared memory's bandwidth as reading K_j.
//
// Shared memory, aligned to 1,024 bytes for the swizzle: Q_i, and K_j and V_j twice, (B_r + 4 B_c) head_dim 2 bytes:
// 48, 96 or 192 KiB. Two blocks per SM, one at head_dim 256.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int B_r = 128, B_c = 64, THREADS = 2 * WARPGROUP;
constexpr int STAGES = 2;  // of the ring: the next K_j and V_j arrive while these are multiplied

template <int D>
struct Shared {
  alignas(1024) uint16_t Q[B_r * D];
  alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
  uint64_t full[STAGES];  // K_j and V_j have arrived, and with the first ones Q_i
};

template <typename T, int D>
__global__ void __launch_bounds__(THREADS, D == 256 ? 1 : 2)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D>*>(raw);

  const int wg = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_blocks = ceil_div(a.q_len, B_r), of_all = blockIdx.x / row_blocks;
  const int head = of_all % a.heads, b = of_all / a.heads, kv_head = head / (a.heads / a.kv_heads);
  const int row_0 = (row_blocks - 1 - blockIdx.x % row_blocks) * B_r;           // causal: the longest rows first
  const int blocks = ceil_div(a.visible(min(row_0 + B_r, a.q_len) - 1), B_c);  // of K and V that some row sees
  const int row = row_0 + wg * 64 + warp * 16 + g;
  const float scale = a.scale * LOG2_E;

  const auto load_block = [&](int j, int stage) {  // line 7; thread 0
    constexpr uint32_t bytes = 2 * B_c * D * sizeof(T), q_bytes = B_r * D * sizeof(T);
    mbarrier_arrive_expect(&s.full[stage], j == 0 ? q_bytes + bytes : bytes);
    if (j == 0) tma_load(s.Q, &q_map, &s.full[stage], row_0, head, b);
    tma_load(s.K[stage], &k_map, &s.full[stage], j * B_c, kv_head, b);
    tma_load(s.V[stage], &v_map, &s.full[stage], j * B_c, kv_head, b);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&s.full[i], 1);  // one arrival, in load_block()
    mbarrier_init_fence();
    if (blocks > 0) load_block(0, 0);
  }
  __syncthreads();  // barriers initialised before any thread waits for them

  const int seen[2] = {a.visible(row) - 2 * t, a.visible(row + 8) - 2 * t};  // from this thread's first column on
  const int whole = a.visible(row_0 + wg * 64) / B_c;                        // all rows see all blocks before it

  float O_i[D / 2] = {}, l_i[2] = {}, m_i[2] = {-INFINITY, -INFINITY};  // row g: [0], row g + 8: [1]
  Ring<STAGES> ring;
  for (int j = 0; j < blocks; ++j) {  // line 6
    if (threadIdx.x == 0 && j + 1 < blocks) load_block(j + 1, ring.index ^ 1);
    mbarrier_wait(&s.full[ring.index], ring.parity);

    float S[B_c / 2], rescale[2];
    begin_S<T, D, B_r, B_c>(S, s.Q + wg * 64 * 64, s.K[ring.index]);  // line 8
    wgmma_wait<0>();

    const int end[2] = {seen[0] - j * B_c, seen[1] - j * B_c};
    if (j < whole) {  // line 9
      softmax<false, B_c>(S, m_i, l_i, rescale, scale, end);
    } else {  // the diagonal or the end of the keys cuts this block
      softmax<true, B_c>(S, m_i, l_i, rescale, scale, end);
    }
    uint32_t P[B_c / 4];
    pack_P<T, B_c>(P, S);
    rescale_O<D>(O_i, rescale);  // line 10

    begin_PV<T, D, B_c>(O_i, P, s.V[ring.index]);  // line 10
    finish_PV(O_i, P);
    ring.next();
    __syncthreads();  // K_j and V_j consumed before thread 0 loads others in their place
  }

  invert(l_i);
  T* out = a.out_head<T>(b, head) + int64_t(row) * a.out_strides.row + 8 * t;
  write_rows<D>(out, a.out_strides.row, a.q_len - row, O_i, l_i);  // line 12
}

template <typename T, int D>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error;
  if ((error = make_tensor_map<T>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, B_r))) return error;
  if ((error = make_tensor_map<T>(&k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  constexpr auto kernel = attention_kernel<T, D>;
  constexpr int bytes = sizeof(Shared<D>);
  if ((error = allow_shared_memory<kernel, bytes>())) return error;
  const int grid = ceil_div(a.q_len, B_r) * a.heads * a.batch;
  kernel<<<grid, THREADS, bytes, stream>>>(a, q_map, k_map, v_map);
  return cudaGetLastError();
}

template <typename T>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  if (a.head_dim == 64) return launch<T, 64>(a, stream);
  if (a.head_dim == 128) return launch<T, 128>(a, stream);
  if (a.head_dim == 256) return launch<T, 256>(a, stream);
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch<__half>(a, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, stream);
  return cudaErrorInvalidValue;
}
