// The decode kernel on tensor cores, fp16 or bf16, sums in fp32.
//
// Every warp has a pipeline of its own: cp.async brings its 16 keys of a tile, then their values, a few stages ahead.
// The warps meet only at the end of a chunk, where their parts are merged. The pipeline runs on meanwhile.
#pragma once
#include <cuda_runtime.h>

#include "decode.cuh"
#include "ptx.cuh"

// The offset in a tile of a row's 16 bytes (8 elements) number `chunk`.
template <int COLUMNS>
DEVICE int offset(int row, int chunk) {
  return row * COLUMNS + 8 * (chunk ^ row % 8);
}

template <typename T>
DEVICE uint32_t pack(float low, float high) {
  const union {
    T pair[2];
    uint32_t bits;
  } u = {{from_float<T>(low), from_float<T>(high)}};
  return u.bits;
}

template <typename T>
DEVICE void mma_16x16(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_m16n8k16<T>(left, a, {b[0], b[1]}, left);
  mma_m16n8k16<T>(right, a, {b[2], b[3]}, right);
}

// 64 KiB of stages leave room for two blocks on an SM of Hopper; at head_dim 256 that takes no less than 96.
template <typename T, int HEAD_DIM, int M>
struct Shared {
  static constexpr int STAGES = (HEAD_DIM == 256 ? 96 : 64) * 1024 / (B_c * HEAD_DIM * 2);
  T Q[16 * M][HEAD_DIM];
  T KV[WARPS][STAGES][KEYS][HEAD_DIM];  // a stage has a warp's keys of a tile, or its values
  Exchange<16 * M, HEAD_DIM> x;
};

// A warp's keys of the tiles of its block's share, a few tiles ahead of where they are used.
template <typename T, int HEAD_DIM>
struct Loader {
  static constexpr int CHUNKS = HEAD_DIM / 8, ROWS_AT_ONCE = 32 / CHUNKS;  // rows of 16-byte pieces that 32 lanes copy
  Walk walk;
  int page;  // of the tile's keys

  DEVICE int first_key() const { return (walk.s.first + walk.tile) * B_c + threadIdx.x / 32 * KEYS; }
  DEVICE void find_page(const Decode& a) {
    if (!a.block_table) {
      page = walk.b;
    } else {
      const int key = first_key();
      page = key < walk.s.len ? a.block_table[walk.b * a.table_stride + key / a.page_size] : -1;
    }
  }
  // Its keys, or its values, to shared memory; zeros for what no row sees.
  DEVICE void copy(const Decode& a, const void* cache, const Strides& strides, T* to) const {
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, key_0 = first_key();
    const int row_0 = a.block_table ? key_0 % a.page_size : key_0;
    const T* from = static_cast<const T*>(cache) + page * strides.batch + walk.pair / a.row_tiles * strides.head +
                    row_0 * strides.row + 8 * chunk;
#pragma unroll
    for (int n = 0; n < KEYS / ROWS_AT_ONCE; ++n) {
      const int row = n * ROWS_AT_ONCE + lane / CHUNKS;
      const bool inside = exists(a) && key_0 + row >= walk.s.begin && key_0 + row < walk.s.len;
      cp_async<16>(to + offset<HEAD_DIM>(row, chunk), inside ? from + row * strides.row : cache, inside);
    }
  }
  DEVICE bool exists(const Decode& a) const { return !a.block_table || unsigned(page) < unsigned(a.pages); }
  DEVICE bool next(const Decode& a) {  // whether there is one
    if (++walk.tile == walk.end) {
      if (!walk.more()) return false;
      walk.next_segment(a);
    }
    find_page(a);
    return true;
  }
};

// Rows of q of a pair, this thread's pieces of them, on their way to shared memory.
template <typename T, int HEAD_DIM, int M>
struct Queries {
  static constexpr int PIECES = 16 * M * HEAD_DIM / 8 / THREADS;
  uint4 x[PIECES];

  DEVICE void load(const Decode& a, int b, int pair) {
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      const int i = threadIdx.x + n * THREADS, row = pair % a.row_tiles * 16 * M + i / (HEAD_DIM / 8);
      const T* q = static_cast<const T*>(a.q) + b * a.q_strides.batch + row / a.group * a.q_strides.row +
                   (int64_t(pair / a.row_tiles) * a.group + row % a.group) * a.q_strides.head;
      x[n] = row < a.rows ? *reinterpret_cast<const uint4*>(q + i % (HEAD_DIM / 8) * 8) : uint4{};
    }
  }
  DEVICE void store(T* Q) const {
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      const int i = threadIdx.x + n * THREADS;
      *reinterpret_cast<uint4*>(Q + offset<HEAD_DIM>(i / (HEAD_DIM / 8), i % (HEAD_DIM / 8))) = x[n];
    }
  }
};

template <typename T, int HEAD_DIM, int M>
__global__ void __launch_bounds__(THREADS) decode_kernel(Decode a) {
  constexpr int D = HEAD_DIM;
  using Memory = Shared<T, D, M>;
  constexpr int STAGES = Memory::STAGES;
  extern __shared__ __align__(128) uint4 shared[];
  Memory& mem = *reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  wait_for_the_launch_before();
  Walk walk;
  const Share share = share_of(a, walk);
  if (share.begin == share.end) return;
  Loader<T, D> loader;
  loader.walk = walk;
  loader.find_page(a);
  bool loading = true;
  unsigned exists = 0;  // bit i: the keys of stage i have a page
  // Stages take turns: keys of a tile, its values, keys of the next tile.
  auto load_K = [&](int stage) {
    if (loading) {
      loader.copy(a, a.k, a.k_strides, mem.KV[warp][stage][0]);
      exists = (exists & ~(1u << stage)) | unsigned(loader.exists(a)) << stage;
    }
    cp_async_commit();
  };
  auto load_V = [&](int stage) {
    if (loading) {
      loader.copy(a, a.v, a.v_strides, mem.KV[warp][stage][0]);
      loading = loader.next(a);
    }
    cp_async_commit();
  };
  constexpr bool EVEN = STAGES % 2 == 0;  // whether STAGES - 1 stages ahead of keys there are values
  Queries<T, D, M> queries;
  queries.load(a, walk.b, walk.pair);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) stage % 2 ? load_V(stage) : load_K(stage);
  queries.store(mem.Q[0]);
  __syncthreads();  // Q complete

  const int a_lane = offset<D>(lane % 16, lane / 16);
  const int b_lane = offset<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const float scale = a.scale * LOG2_E;
  float O_i[M][D / 8][4], m_i[M][2], l_i[M][2];
  int stage = 0;
  bool first_chunk = true;

  while (true) {  // chunks
    const int chunk = a.chunks ? walk.tile / walk.s.chunk : 0;
    const int chunk_end = a.chunks ? min((chunk + 1) * walk.s.chunk, walk.end) : walk.end;
#pragma unroll
    for (int r = 0; r < M; ++r) {
      m_i[r][0] = m_i[r][1] = -INFINITY, l_i[r][0] = l_i[r][1] = 0.0f;
#pragma unroll
      for (int e = 0; e < D / 8; ++e) O_i[r][e][0] = O_i[r][e][1] = O_i[r][e][2] = O_i[r][e][3] = 0.0f;
    }
#pragma unroll 1
    for (; walk.tile < chunk_end; ++walk.tile) {
      __syncwarp();  // the stage that is loaded now has been read
      EVEN ? load_V((stage + STAGES - 1) % STAGES) : load_K((stage + STAGES - 1) % STAGES);
      cp_async_wait<STAGES - 1>();
      __syncwarp();  // K_j complete
      const T* K_j = mem.KV[warp][stage][0];
      const bool exists_j = exists >> stage & 1;

      float S[M][2][4] = {};
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t K[4];
        ldmatrix_x4(K, K_j + (b_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < M; ++r) {
          uint32_t Q[4];
          ldmatrix_x4(Q, mem.Q[16 * r] + (a_lane ^ 16 * e));
          mma_16x16<T>(S[r][0], S[r][1], Q, K);
        }
      }

      const int key_0 = (walk.s.first + walk.tile) * B_c + warp * KEYS;
      const bool all = exists_j && key_0 + KEYS <= walk.s.len - a.q_len + 1 &&
                       key_0 >= walk.s.begin + (a.window ? a.q_len - 1 : 0);
      if (!all) {
#pragma unroll
        for (int r = 0; r < M; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = walk.pair % a.row_tiles * 16 * M + 16 * r + g + i / 2 * 8;
            const int p = walk.s.len - a.q_len + row / a.group;  // where the row's token stands
            const int from = a.window ? max(walk.s.begin, p - a.window + 1) : walk.s.begin;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int key = key_0 + 8 * c + 2 * t + i % 2;
              const bool seen = exists_j && key >= from && key <= p;
              S[r][c][i] = seen ? S[r][c][i] : -INFINITY;
            }
          }
        }
      }

      uint32_t P[M][4];
#pragma unroll
      for (int r = 0; r < M; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float m_new = fmaxf(fmaxf(S[r][0][2 * h], S[r][0][2 * h + 1]), fmaxf(S[r][1][2 * h], S[r][1][2 * h + 1]));
          m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
          m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
          m_new = fmaxf(m_i[r][h], scale * m_new);
          const float shift = m_new == -INFINITY ? 0.0f : m_new;
          const float rescale = fast_exp2(m_i[r][h] - shift);
          m_i[r][h] = m_new;
          l_i[r][h] *= rescale;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) {
              S[r][c][i] = fast_exp2(fmaf(scale, S[r][c][i], -shift));
              l_i[r][h] += S[r][c][i];
            }
          }
#pragma unroll
          for (int e = 0; e < D / 8; ++e) O_i[r][e][2 * h] *= rescale, O_i[r][e][2 * h + 1] *= rescale;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) P[r][i] = pack<T>(S[r][i / 2][i % 2 * 2], S[r][i / 2][i % 2 * 2 + 1]);
      }
      stage = (stage + 1) % STAGES;
      __syncwarp();  // K_j has been read: its stage is loaded now
      EVEN ? load_K((stage + STAGES - 1) % STAGES) : load_V((stage + STAGES - 1) % STAGES);
      cp_async_wait<STAGES - 1>();
      __syncwarp();  // V_j complete
      const T* V_j = mem.KV[warp][stage][0];
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t V[4];
        ldmatrix_x4_trans(V, V_j + (a_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < M; ++r) mma_16x16<T>(O_i[r][2 * e], O_i[r][2 * e + 1], P[r], V);
      }
      stage = (stage + 1) % STAGES;
    }

    const int rows = a.rows - walk.pair % a.row_tiles * 16 * M;
    const bool segment_ends = walk.tile == walk.end, more = walk.more();
    constexpr int COLUMNS = Exchange<16 * M, D>::COLUMNS;
    Walk next = walk;
    if (segment_ends && more) {
      next.next_segment(a);
      queries.load(a, next.b, next.pair);  // arrives while the parts are merged
    }
#pragma unroll
    for (int e_0 = 0; e_0 < D; e_0 += COLUMNS) {
      if (e_0) __syncthreads();  // the columns before have been merged
#pragma unroll
      for (int r = 0; r < M; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * r + 8 * h + g;
          float l = l_i[r][h];
          l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
          if (row >= rows) continue;
          if (t == 0) mem.x.m[warp][row] = m_i[r][h], mem.x.l[warp][row] = l;
#pragma unroll
          for (int e = 0; e < COLUMNS / 8; ++e)
            *reinterpret_cast<float2*>(&mem.x.O[warp][row][8 * e + 2 * t]) =
                make_float2(O_i[r][e_0 / 8 + e][2 * h], O_i[r][e_0 / 8 + e][2 * h + 1]);
        }
      }
      __syncthreads();  // the warps' parts complete, Q consumed
      merge_warps<T, 16 * M, D>(a, walk, mem.x, e_0, first_chunk, segment_ends, chunk);
    }
    if (segment_ends && !walk.whole()) merge_blocks<T, 16 * M, D>(a, share, walk, mem.x);
    if (segment_ends && !more) break;
    if (segment_ends) queries.store(mem.Q[0]);
    first_chunk = segment_ends;
    walk = next;
    __syncthreads();  // the parts consumed, the next Q complete
  }
}

template <typename T, int HEAD_DIM, int M>
static cudaError_t launch(const Decode& a, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<T, HEAD_DIM, M>);
  if (cudaError_t error = allow_shared_memory<decode_kernel<T, HEAD_DIM, M>, bytes>()) return error;
  return launch_kernel(decode_kernel<T, HEAD_DIM, M>, blocks, THREADS, bytes, stream, a);
}

template <typename T>
static cudaError_t launch(Decode& a, int head_dim, int blocks, cudaStream_t stream) {
  const bool two = rows_of_a_pair(a.rows, head_dim) == 32;
  if (head_dim == 64) return two ? launch<T, 64, 2>(a, blocks, stream) : launch<T, 64, 1>(a, blocks, stream);
  if (head_dim == 128) return two ? launch<T, 128, 2>(a, blocks, stream) : launch<T, 128, 1>(a, blocks, stream);
  if (head_dim == 256) return launch<T, 256, 1>(a, blocks, stream);
  return cudaErrorInvalidValue;
}
