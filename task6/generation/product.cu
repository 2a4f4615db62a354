// x @ w.T for few rows of x: the products of a decode step. Each weight is read once, and nothing else takes long.
//
//   x (rows, K) with up to 16 rows, w (N, K)   fp32, fp16 or bf16, sums in fp32
//   out (rows, N), or with SwiGLU (rows, N / 2): w has the rows of gate, then those of up
//   out = residual + x @ w.T where there is a residual, which may be out itself
//   norm: x is x / sqrt(mean(x^2) + eps) * norm instead; with row_sums (x - mean(x)) / sqrt(var(x) + eps) * norm. The
//         means are of the values that a warp reads for the product anyway, so that the norm costs nothing
//
//   grid  (blocks): block b has the tiles b, b + gridDim.x, ... of 16 rows of w
//   block (256): warp i has every eighth part of K; the warps' sums are added in shared memory
//
// In 16 bits a tile is a product on tensor cores, m16n8k16, with w as the 16 rows and x as the 8 columns: 16 rows of x
// take two. A lane loads 16 bytes of a row, 8 neighbours in k, where a fragment has 2 and 2 that are 8 apart: the sum
// over k has no order, so both operands are taken in the same other one.
#include <cuda_runtime.h>

#include "product.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILE = 16;    // rows of w
constexpr int UNROLL = 4;   // loads of a lane that are on their way together, of each of its rows

// Row r of tile `tile`: with SwiGLU rows 8 and on are those of up, whose gate are rows 0 to 7.
DEVICE int row_of(const Arguments& p, int tile, int r) {
  return p.activation == SWIGLU ? tile * 8 + r % 8 + (r < 8 ? 0 : p.N / 2) : tile * TILE + r;
}

// The end of a tile: the warps' sums, part[warp][row of w][row of x], and x's moments, become rows of out.
template <typename T, int X_ROWS>
DEVICE void finish(const Arguments& p, int tile, const float (*part)[TILE][X_ROWS + 1],
                   const Moments (*of_warps)[X_ROWS]) {
  const bool swiglu = p.activation == SWIGLU;
  __syncthreads();  // the sums complete
  for (int i = threadIdx.x; i < TILE * X_ROWS; i += THREADS) {
    const int r = i % TILE, row = i / TILE, n = row_of(p, tile, r);
    if (row >= p.rows || (swiglu && r >= 8) || n >= (swiglu ? p.N / 2 : p.N)) continue;
    float sum = 0.0f, up = 0.0f;
    Moments moments = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      sum += part[warp][r][row];
      if (swiglu) up += part[warp][r + 8][row];
      moments.add(of_warps[warp][row]);
    }
    put(p, row, n, finished<T>(p, sum, up, moments, load_beside<T>(p, row, n)));
  }
  __syncthreads();  // the sums consumed
}

// ---- 16 bits, on tensor cores

template <typename T, int X_ROWS>
__global__ void __launch_bounds__(THREADS) tensor_core_kernel(Arguments p) {
  constexpr int COLUMNS = X_ROWS / 8, STEP = 32;  // of k, in one load of a warp
  __shared__ float part[WARPS][TILE][X_ROWS + 1];
  __shared__ Moments moments[WARPS][X_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T *x = static_cast<const T*>(p.x), *w = static_cast<const T*>(p.w), *norm = static_cast<const T*>(p.norm);
  const int tiles = ceil_div(p.N, TILE), steps = ceil_div(p.K, STEP);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row_0 = row_of(p, tile, g), row_8 = row_of(p, tile, g + 8);
    const T *w_0 = w + row_0 * p.w_stride + 8 * t, *w_8 = w + row_8 * p.w_stride + 8 * t;
    float sum[COLUMNS][4] = {};
    Moments of_x[COLUMNS] = {};
    for (int first = warp; first < steps; first += WARPS * UNROLL) {
      uint4 a_0[UNROLL], a_8[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const int k = (first + i * WARPS) * STEP;
        const bool inside = k + 8 * t < p.K;
        a_0[i] = inside && row_0 < p.N ? __ldcs(reinterpret_cast<const uint4*>(w_0 + k)) : uint4{};
        a_8[i] = inside && row_8 < p.N ? __ldcs(reinterpret_cast<const uint4*>(w_8 + k)) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const int k = (first + i * WARPS) * STEP + 8 * t;
        const uint4 by = p.norm && k < p.K ? *reinterpret_cast<const uint4*>(norm + k) : uint4{};
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int row = 8 * c + g;
          uint4 b = k < p.K && row < p.rows ? *reinterpret_cast<const uint4*>(x + row * p.x_stride + k) : uint4{};
          if (p.norm) {
            of_x[c].template add<T>(b);
            b = scaled<T>(b, by);
          }
          mma_m16n8k16<T>(sum[c], {a_0[i].x, a_8[i].x, a_0[i].y, a_8[i].y}, {b.x, b.y}, sum[c]);
          mma_m16n8k16<T>(sum[c], {a_0[i].z, a_8[i].z, a_0[i].w, a_8[i].w}, {b.z, b.w}, sum[c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      of_x[c].add_lanes(1), of_x[c].add_lanes(2);
      if (t == 0) moments[warp][8 * c + g] = of_x[c];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[warp][g + i / 2 * 8][8 * c + 2 * t + i % 2] = sum[c][i];
    }
    finish<T, X_ROWS>(p, tile, part, moments);
  }
}

// ---- fp32, on CUDA cores: a warp has four rows of w at a time, so that a value of x is used four times

template <int X_ROWS>
__global__ void __launch_bounds__(THREADS) float_kernel(Arguments p) {
  constexpr int R = 4, STEP = 128;
  __shared__ float part[WARPS][TILE][X_ROWS + 1];
  __shared__ Moments moments[WARPS][X_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float *x = static_cast<const float*>(p.x), *w = static_cast<const float*>(p.w);
  const float* norm = static_cast<const float*>(p.norm);
  const int tiles = ceil_div(p.N, TILE);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int r_0 = 0; r_0 < TILE; r_0 += R) {
      float sum[R][X_ROWS] = {};
      Moments of_x[X_ROWS] = {};
      for (int k = warp * STEP + 4 * lane; k < p.K; k += WARPS * STEP) {
        float4 a[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const int row = row_of(p, tile, r_0 + r);
          a[r] = row < p.N ? __ldcs(reinterpret_cast<const float4*>(w + row * p.w_stride + k)) : float4{};
        }
        const float4 by = p.norm ? *reinterpret_cast<const float4*>(norm + k) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
#pragma unroll
        for (int row = 0; row < X_ROWS; ++row) {
          if (row >= p.rows) break;
          float4 b = *reinterpret_cast<const float4*>(x + row * p.x_stride + k);
          of_x[row].add(b);
          b.x *= by.x, b.y *= by.y, b.z *= by.z, b.w *= by.w;
#pragma unroll
          for (int r = 0; r < R; ++r)
            sum[r][row] = fmaf(a[r].x, b.x, fmaf(a[r].y, b.y, fmaf(a[r].z, b.z, fmaf(a[r].w, b.w, sum[r][row]))));
        }
      }
#pragma unroll
      for (int row = 0; row < X_ROWS; ++row) {
        for (int step = 16; step > 0; step /= 2) of_x[row].add_lanes(step);
        if (lane == 0) moments[warp][row] = of_x[row];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float s = sum[r][row];
          for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
          if (lane == 0) part[warp][r_0 + r][row] = s;
        }
      }
    }
    finish<float, X_ROWS>(p, tile, part, moments);
  }
}

extern "C" cudaError_t product(View x, View w, const void* norm, const void* row_sums, const void* bias, View residual,
                               int has_residual, View out, int activation, float eps, int blocks, int dtype,
                               cudaStream_t stream) {
  const Arguments p = make_arguments(x, w, norm, row_sums, bias, residual, has_residual, out, activation, eps);
  const bool few = p.rows <= 8;
  if (dtype == FLOAT32) {
    if (p.rows <= 1)
      float_kernel<1><<<blocks, THREADS, 0, stream>>>(p);
    else if (p.rows <= 4)
      float_kernel<4><<<blocks, THREADS, 0, stream>>>(p);
    else if (few)
      float_kernel<8><<<blocks, THREADS, 0, stream>>>(p);
    else
      float_kernel<16><<<blocks, THREADS, 0, stream>>>(p);
  } else if (dtype == FLOAT16) {
    if (few)
      tensor_core_kernel<__half, 8><<<blocks, THREADS, 0, stream>>>(p);
    else
      tensor_core_kernel<__half, 16><<<blocks, THREADS, 0, stream>>>(p);
  } else {
    if (few)
      tensor_core_kernel<__nv_bfloat16, 8><<<blocks, THREADS, 0, stream>>>(p);
    else
      tensor_core_kernel<__nv_bfloat16, 16><<<blocks, THREADS, 0, stream>>>(p);
  }
  return cudaGetLastError();
}
