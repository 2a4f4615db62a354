// Rung 13, ping-pong: a warpgroup's softmax runs beside another warpgroup's products and beside its own.
// architectures: sm_90a cpu
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, scheduled as in [FA3] arXiv:2407.08608, sections 3.1-2.
//
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)     fp16 or bf16, sums in fp32
//   grid  (ceil(q_len / B_r) heads batch)      one block per Q_i; those of a head are neighbours: they share K, V in L2
//   block (128 (1 + CONSUMERS))                one per SM: it has all the registers
//     warp 0, one thread   the producer: loads Q_i, K_j and V_j by TMA as soon as a buffer is free
//     warps 1 to 3         exit at once; setmaxnreg moves registers of whole warpgroups
//     the other warps      consumers: warpgroup w has the rows 64 w ... 64 w + 63 of Q_i, all columns
//   head_dim 64, 128 or 256, scale above 0, pointers and strides multiples of 16 bytes: checked by the caller
//
//   line  8    S   = Q_i K_j^T                 wgmma, both operands from shared memory
//   line  9    m'  = max(m_i, rowmax(S))       four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j      wgmma, P from registers
//   line 12    O_i = diag(l_i)^-1 O_i          once, at the end
//
// Against rung 12, where a warpgroup waits for S, computes P, then waits for P V_j: an SM computes 16 exp2 per cycle,
// and 4,096 operations of a product. The exp2 of 128 x 128 elements of S take 1,024 cycles. Their products take 2,048
// at head_dim 128 and 1,024 at 64, and the softmax has a maximum and a sum besides. So it has to run beside products
//   of another warpgroup   consumers alternate: one issues its products, lets the next one issue, and computes its
//                          softmax meanwhile. In rung 12 they can fall into step, and all wait for the tensor cores
//   of its own             the next S is issued before P V_j, which queues behind it in the tensor cores. S is complete
//                          first, and its softmax runs beside P V_j. P is in use until P V_j is complete, so S and P
//                          need registers at once: B_c / 2 + B_c / 4
//   masks                  two loops: one over the blocks of keys that the diagonal or the end cuts, which are the last
//                          ones and now come first, and one over the others. A single loop with a branch, while a wgmma
//                          writes O_i, takes 237 registers at head_dim 128; two loops take 183
//
// What limits it: the prologue and the epilogue of a block, which overlap with nothing.
//
// Shared memory, aligned to 1,024 bytes for the swizzle: (B_r + 4 B_c) head_dim 2 bytes
//   head_dim  64: B_r 192, B_c 128    24 + 4 * 16 =  88 KiB
//            128: B_r 128, B_c 128    32 + 4 * 32 = 160 KiB
//            256: B_r 128, B_c  80    64 + 4 * 40 = 224 KiB
// Registers: a block starts with 65,536 / threads per thread. Then a thread of the producer's warpgroup keeps 24 (32),
// and one of 2 (3) consumers has 240 (160): O_i takes head_dim / 2, S B_c / 2, P B_c / 4.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int STAGES = 2;  // of the rings of K and V

enum NamedBarrier { TURN = 1 };  // TURN + w: consumer w may issue its products. Barrier 0 is __syncthreads()

template <int D, int CONSUMERS, int B_c>
struct Shared {
  static constexpr int B_r = 64 * CONSUMERS;
  alignas(1024) uint16_t Q[B_r * D];
  alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
  // full: the buffer's contents have arrived. empty: all its readers are done
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <typename T, int D, int CONSUMERS, int B_c>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  constexpr int B_r = 64 * CONSUMERS;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D, CONSUMERS, B_c>*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  if (threadIdx.x == 0) {
    mbarrier_init(&s.q_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * CONSUMERS);  // the consumers' warps
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before any thread uses them

  const int row_blocks = ceil_div(a.q_len, B_r), of_all = blockIdx.x / row_blocks;
  const int head = of_all % a.heads, b = of_all / a.heads;
  const int row_0 = (row_blocks - 1 - blockIdx.x % row_blocks) * B_r;           // causal: the longest rows first
  const int blocks = ceil_div(a.visible(min(row_0 + B_r, a.q_len) - 1), B_c);  // of K and V that some row sees
  Ring<STAGES> k, v;

  if (warpgroup == 0) {
    registers_give<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x == 0 && blocks > 0) {  // the producer
      const int kv_head = head / (a.heads / a.kv_heads);
      mbarrier_arrive_expect(&s.q_full, B_r * D * sizeof(T));
      tma_load(s.Q, &q_map, &s.q_full, row_0, head, b);
      for (int j = blocks - 1; j >= -1; --j) {  // line 7, in the order of use: K, K V, K V, ..., V
        if (j >= 0) {
          mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
          mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
          tma_load(s.K[k.index], &k_map, &s.k_full[k.index], j * B_c, kv_head, b);
          k.next();
        }
        if (j < blocks - 1) {
          mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
          mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
          tma_load(s.V[v.index], &v_map, &s.v_full[v.index], (j + 1) * B_c, kv_head, b);
          v.next();
        }
      }
    }
    return;
  }

  // ---- A consumer
  registers_take<CONSUMERS == 2 ? 240 : 160>();
  const int wg = warpgroup - 1, warp = threadIdx.x % WARPGROUP / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = row_0 + wg * 64 + warp * 16 + g;
  const float scale = a.scale * LOG2_E;

  // Consumers alternate. While a consumer's products run, it computes its softmax, and the next consumer's products
  // queue behind them.
  const auto wait_for_turn = [&] { barrier_sync(TURN + wg, 2 * WARPGROUP); };
  const auto pass_turn = [&] { barrier_arrive(TURN + (wg + 1) % CONSUMERS, 2 * WARPGROUP); };
  if (wg == CONSUMERS - 1) pass_turn();  // consumer 0 begins

  float S[B_c / 2], O_i[D / 2] = {}, l_i[2] = {}, rescale[2];  // row g: h = 0, row g + 8: h = 1
  float m_i[2] = {-INFINITY, -INFINITY};
  uint32_t P[B_c / 4];

  if (blocks > 0) {
    const int seen[2] = {a.visible(row) - 2 * t, a.visible(row + 8) - 2 * t};  // from this thread's first column on
    const int whole = a.visible(row_0 + wg * 64) / B_c;                        // all rows see all blocks before it

    int j = blocks - 1;  // the first S has no P V_j beside it
    mbarrier_wait(&s.q_full, 0);
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    begin_S<T, D, B_r, B_c>(S, s.Q + wg * 64 * 64, s.K[k.index]);  // line 8
    pass_turn();
    wgmma_wait<0>();
    arrive_as_warp(&s.k_empty[k.index]);  // S is complete: K_j has been read
    k.next();
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});  // line 9
    pack_P<T, B_c>(P, S);

    // Each further S beside the P V_j of the previous block: S is complete first, and its softmax runs beside P V_j
    const auto step = [&](auto masked) {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q + wg * 64 * 64, s.K[k.index]);  // line 8
      mbarrier_wait(&s.v_full[v.index], v.parity);
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);  // line 10
      pass_turn();
      wgmma_wait<1>();
      arrive_as_warp(&s.k_empty[k.index]);
      k.next();
      softmax<masked.value, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});  // line 9
      finish_PV(O_i, P);
      arrive_as_warp(&s.v_empty[v.index]);  // O_i is complete: V_j has been read
      v.next();
      rescale_O<D>(O_i, rescale);  // line 10
      pack_P<T, B_c>(P, S);
    };
    for (--j; j >= whole; --j) step(std::true_type{});
#pragma unroll 1
    for (; j >= 0; --j) step(std::false_type{});

    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
    finish_PV(O_i, P);
  }
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left with arrivals
  invert(l_i);
  T* out = a.out_head<T>(b, head) + int64_t(row) * a.out_strides.row + 8 * t;
  write_rows<D>(out, a.out_strides.row, a.q_len - row, O_i, l_i);  // line 12
}

template <typename T, int D, int CONSUMERS, int B_c>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  constexpr int B_r = 64 * CONSUMERS, bytes = sizeof(Shared<D, CONSUMERS, B_c>);
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error;
  if ((error = make_tensor_map<T>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, B_r))) return error;
  if ((error = make_tensor_map<T>(&k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  constexpr auto kernel = attention_kernel<T, D, CONSUMERS, B_c>;
  if ((error = allow_shared_memory<kernel, bytes>())) return error;
  const int grid = ceil_div(a.q_len, B_r) * a.heads * a.batch;
  kernel<<<grid, (1 + CONSUMERS) * WARPGROUP, bytes, stream>>>(a, q_map, k_map, v_map);
  return cudaGetLastError();
}

template <typename T>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  if (a.head_dim == 64) return launch<T, 64, 3, 128>(a, stream);
  if (a.head_dim == 128) return launch<T, 128, 2, 128>(a, stream);
  if (a.head_dim == 256) return launch<T, 256, 2, 80>(a, stream);
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch<__half>(a, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, stream);
  return cudaErrorInvalidValue;
}
