// x @ w.T for few rows of x: the products of a decode step. Each weight is read once, and nothing else takes long.
//
//   x (rows, K) with up to 16 rows, w (N, K)   fp32, fp16 or bf16, sums in fp32
//   out (rows, N), or with SwiGLU (rows, N / 2): w has the rows of gate, then those of up
//   out = residual + x @ w.T where there is a residual, which may be out itself
//   norm: x is x / sqrt(mean(x^2) + eps) * norm instead. The mean is of the values that a warp reads for the product
//         anyway, so that the norm costs nothing: its factor is applied to the sums
//
//   grid  (blocks): block b has the tiles b, b + gridDim.x, ... of 16 rows of w
//   block (256): warp i has every eighth part of K; the warps' sums are added in shared memory
//
// In 16 bits a tile is a product on tensor cores, m16n8k16, with w as the 16 rows and x as the 8 columns: 16 rows of x
// take two. A lane loads 16 bytes of a row, 8 neighbours in k, where a fragment has 2 and 2 that are 8 apart: the sum
// over k has no order, so both operands are taken in the same other one.
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

#define DEVICE __device__ __forceinline__

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILE = 16;    // rows of w
constexpr int UNROLL = 4;   // loads of a lane that are on their way together, of each of its rows

struct Product {
  const void *x, *w, *norm, *residual;
  void* out;
  int64_t x_stride, w_stride, residual_stride, out_stride;
  int rows, N, K;
  bool swiglu;
  float eps;
};

// Row r of tile `tile`: with SwiGLU rows 8 and on are those of up, whose gate are rows 0 to 7.
DEVICE int row_of(const Product& p, int tile, int r) {
  return p.swiglu ? tile * 8 + r % 8 + (r < 8 ? 0 : p.N / 2) : tile * TILE + r;
}

template <typename T>
DEVICE uint32_t scaled(uint32_t pair, uint32_t by) {  // both products, rounded as the plain model rounds x * norm
  union {
    uint32_t bits;
    T values[2];
  } x = {pair}, y = {by};
  x.values[0] = from_float<T>(to_float(x.values[0]) * to_float(y.values[0]));
  x.values[1] = from_float<T>(to_float(x.values[1]) * to_float(y.values[1]));
  return x.bits;
}

template <typename T>
DEVICE float squares(uint32_t pair) {
  const union {
    uint32_t bits;
    T values[2];
  } x = {pair};
  const float a = to_float(x.values[0]), b = to_float(x.values[1]);
  return a * a + b * b;
}

// The end of a tile: the warps' sums, part[warp][row of w][row of x], and the squares of x, become rows of out.
template <typename T, int X_ROWS>
DEVICE void finish(const Product& p, int tile, const float (*part)[TILE][X_ROWS + 1], const float (*square)[X_ROWS]) {
  __syncthreads();  // the sums complete
  for (int i = threadIdx.x; i < TILE * X_ROWS; i += THREADS) {
    const int r = i % TILE, row = i / TILE;
    if (row >= p.rows || (p.swiglu && r >= 8) || row_of(p, tile, r) >= (p.swiglu ? p.N / 2 : p.N)) continue;
    float sum = 0.0f, up = 0.0f, norm = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      sum += part[warp][r][row];
      if (p.swiglu) up += part[warp][r + 8][row];
      norm += square[warp][row];
    }
    const float factor = p.norm ? 1.0f / sqrtf(norm / p.K + p.eps) : 1.0f;
    sum *= factor;
    if (p.swiglu) {
      sum = to_float(from_float<T>(sum));
      sum = sum / (1.0f + expf(-sum)) * to_float(from_float<T>(up * factor));
    }
    const int n = row_of(p, tile, r);
    if (p.residual) {
      const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
      sum = to_float(from_float<T>(sum)) + to_float(residual[n]);
    }
    static_cast<T*>(p.out)[row * p.out_stride + n] = from_float<T>(sum);
  }
  __syncthreads();  // the sums consumed
}

// ---- 16 bits, on tensor cores

template <typename T, int X_ROWS>
__global__ void __launch_bounds__(THREADS) tensor_core_kernel(Product p) {
  constexpr int COLUMNS = X_ROWS / 8, STEP = 32;  // of k, in one load of a warp
  __shared__ float part[WARPS][TILE][X_ROWS + 1], square[WARPS][X_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T *x = static_cast<const T*>(p.x), *w = static_cast<const T*>(p.w), *norm = static_cast<const T*>(p.norm);
  const int tiles = ceil_div(p.N, TILE), steps = ceil_div(p.K, STEP);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row_0 = row_of(p, tile, g), row_8 = row_of(p, tile, g + 8);
    const T *w_0 = w + row_0 * p.w_stride + 8 * t, *w_8 = w + row_8 * p.w_stride + 8 * t;
    float sum[COLUMNS][4] = {}, of_squares[COLUMNS] = {};
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
            of_squares[c] += squares<T>(b.x) + squares<T>(b.y) + squares<T>(b.z) + squares<T>(b.w);
            b = make_uint4(scaled<T>(b.x, by.x), scaled<T>(b.y, by.y), scaled<T>(b.z, by.z), scaled<T>(b.w, by.w));
          }
          mma_m16n8k16<T>(sum[c], {a_0[i].x, a_8[i].x, a_0[i].y, a_8[i].y}, {b.x, b.y}, sum[c]);
          mma_m16n8k16<T>(sum[c], {a_0[i].z, a_8[i].z, a_0[i].w, a_8[i].w}, {b.z, b.w}, sum[c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      float all = of_squares[c];
      all += __shfl_xor_sync(~0u, all, 1), all += __shfl_xor_sync(~0u, all, 2);
      if (t == 0) square[warp][8 * c + g] = all;
#pragma unroll
      for (int i = 0; i < 4; ++i) part[warp][g + i / 2 * 8][8 * c + 2 * t + i % 2] = sum[c][i];
    }
    finish<T, X_ROWS>(p, tile, part, square);
  }
}

// ---- fp32, on CUDA cores: a warp has four rows of w at a time, so that a value of x is used four times

template <int X_ROWS>
__global__ void __launch_bounds__(THREADS) float_kernel(Product p) {
  constexpr int R = 4, STEP = 128;
  __shared__ float part[WARPS][TILE][X_ROWS + 1], square[WARPS][X_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float *x = static_cast<const float*>(p.x), *w = static_cast<const float*>(p.w);
  const float* norm = static_cast<const float*>(p.norm);
  const int tiles = ceil_div(p.N, TILE);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int r_0 = 0; r_0 < TILE; r_0 += R) {
      float sum[R][X_ROWS] = {}, of_squares[X_ROWS] = {};
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
          of_squares[row] += b.x * b.x + b.y * b.y + (b.z * b.z + b.w * b.w);
          b.x *= by.x, b.y *= by.y, b.z *= by.z, b.w *= by.w;
#pragma unroll
          for (int r = 0; r < R; ++r)
            sum[r][row] = fmaf(a[r].x, b.x, fmaf(a[r].y, b.y, fmaf(a[r].z, b.z, fmaf(a[r].w, b.w, sum[r][row]))));
        }
      }
#pragma unroll
      for (int row = 0; row < X_ROWS; ++row) {
        float all = of_squares[row];
        for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
        if (lane == 0) square[warp][row] = all;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float s = sum[r][row];
          for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
          if (lane == 0) part[warp][r_0 + r][row] = s;
        }
      }
    }
    finish<float, X_ROWS>(p, tile, part, square);
  }
}

extern "C" cudaError_t product(View x, View w, View norm, int has_norm, View residual, int has_residual, View out,
                               int swiglu, float eps, int blocks, int dtype, cudaStream_t stream) {
  Product p = {x.data, w.data, has_norm ? norm.data : nullptr, has_residual ? residual.data : nullptr, out.data};
  p.x_stride = x.strides[0], p.w_stride = w.strides[0], p.residual_stride = residual.strides[0];
  p.out_stride = out.strides[0];
  p.rows = x.sizes[0], p.N = w.sizes[0], p.K = w.sizes[1];
  p.swiglu = swiglu, p.eps = eps;
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
