"""Attention as one kernel in one Python file: no score leaves the chip. [FA2] arXiv:2307.08691, Algorithm 1.

line  8    S   = scale Q_i K_j^T
line  9    m'  = max(m_i, rowmax(S))     P = exp(S - m')     l_i = exp(m_i - m') l_i + rowsum(P)
line 10    O_i = exp(m_i - m') O_i + P V_j      (printed with ^-1 in the paper: a known typo)
line 12    O_i = O_i / l_i
"""

import math

import torch
from torch import Tensor

from common.build import Kernels
from common.inputs import check_attention

_CUDA_SRC = r"""
#include <cuda_runtime.h>

#include "tensor.cuh"

constexpr int LANES = 16;  // a block has 16 x 16 threads
constexpr int B_r = 64, B_c = 32, D = 64;
constexpr int ROWS = B_r / LANES, COLS = B_c / LANES, PARTS = D / LANES;  // of S and O, for each thread

// Element e of row i of head h is row_of(x, b, i, h)[e].
__device__ float* row_of(const View& x, int b, int i, int h) {
  return x.as<float>() + b * x.strides[0] + i * x.strides[1] + h * x.strides[2];
}

// tile[r][e] = factor x[first + r][e]; zeros past the last row, or past head_dim
__device__ void load(float (*tile)[D + 4], int rows, const View& x, int b, int first, int h, float factor) {
  for (int n = threadIdx.y * LANES + threadIdx.x; n < rows * D; n += LANES * LANES) {
    const int r = n / D, e = n % D;
    const bool inside = first + r < x.sizes[1] && e < x.sizes[3];
    tile[r][e] = inside ? factor * row_of(x, b, first + r, h)[e] : 0.0f;
  }
}

// Thread (tx, ty) has rows ty, ty + 16, ... of the tile: columns tx, tx + 16, ... of S and of O.
__global__ void __launch_bounds__(LANES* LANES) fused(View q, View k, View v, View out, float scale, bool causal) {
  // + 4: 8 threads read 16 bytes each of 8 rows of K_j from 32 different banks. + 16: a warp has two rows of P.
  __shared__ __align__(16) float Q_i[B_r][D + 4], KV_j[B_c][D + 4], P[B_r][B_c + 16];
  const int q_len = q.sizes[1], heads = q.sizes[2], kv_len = k.sizes[1];
  const int b = blockIdx.x / heads, h = blockIdx.x % heads, kv_head = h / (heads / int(k.sizes[2]));
  const int tx = threadIdx.x, ty = threadIdx.y, row_0 = blockIdx.y * B_r, diagonal = kv_len - q_len;
  float O_i[ROWS][PARTS] = {}, m_i[ROWS], l_i[ROWS] = {};
  for (int r = 0; r < ROWS; ++r) m_i[r] = -INFINITY;
  load(Q_i, B_r, q, b, row_0, h, scale);

  const int end = causal ? min(kv_len, min(row_0 + B_r, q_len) + diagonal) : kv_len;  // no row sees a key after it
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {  // line 6
    load(KV_j, B_c, k, b, col_0, kv_head, 1.0f);
    __syncthreads();  // K_j (and Q_i) complete
    float S[ROWS][COLS] = {};
#pragma unroll 4
    for (int e = 0; e < D; e += 4)
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const float4 key = *reinterpret_cast<float4*>(&KV_j[tx + LANES * c][e]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {  // line 8
          const float4 query = *reinterpret_cast<float4*>(&Q_i[ty + LANES * r][e]);
          S[r][c] += query.x * key.x, S[r][c] += query.y * key.y;
          S[r][c] += query.z * key.z, S[r][c] += query.w * key.w;
        }
      }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // line 9
      const int last = causal ? row_0 + ty + LANES * r + diagonal : kv_len;
      float m = m_i[r];
      for (int c = 0; c < COLS; ++c) {
        const int col = col_0 + tx + LANES * c;
        if (col >= kv_len || col > last) S[r][c] = -INFINITY;
        m = fmaxf(m, S[r][c]);
      }
      for (int lane = LANES / 2; lane > 0; lane /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lane));  // 16 share a row
      const float shift = m == -INFINITY ? 0.0f : m;  // no key so far: -inf - -inf would be NaN
      const float rescale = expf(m_i[r] - shift);
      m_i[r] = m, l_i[r] *= rescale;  // l_i of this thread's columns; the 16 parts are added at the end
      for (int c = 0; c < COLS; ++c) l_i[r] += P[ty + LANES * r][tx + LANES * c] = expf(S[r][c] - shift);
      for (int p = 0; p < PARTS; ++p) O_i[r][p] *= rescale;
    }
    __syncthreads();  // P complete, K_j consumed
    load(KV_j, B_c, v, b, col_0, kv_head, 1.0f);
    __syncthreads();  // V_j complete
#pragma unroll 4
    for (int c = 0; c < B_c; ++c)
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) O_i[r][p] += P[ty + LANES * r][c] * KV_j[c][tx + LANES * p];  // line 10
    __syncthreads();  // V_j and P consumed before they are overwritten
  }
  for (int r = 0; r < ROWS; ++r) {  // line 12
    for (int lane = LANES / 2; lane > 0; lane /= 2) l_i[r] += __shfl_xor_sync(~0u, l_i[r], lane);
    const int row = row_0 + ty + LANES * r;
    for (int p = 0; p < PARTS; ++p)
      if (row < q_len && tx + LANES * p < q.sizes[3])
        row_of(out, b, row, h)[tx + LANES * p] = l_i[r] == 0.0f ? 0.0f : O_i[r][p] / l_i[r];
  }
}

extern "C" cudaError_t attention(View q, View k, View v, View out, float scale, int causal, cudaStream_t stream) {
  const dim3 grid(q.sizes[0] * q.sizes[2], ceil_div(q.sizes[1], B_r));
  fused<<<grid, dim3(LANES, LANES), 0, stream>>>(q, k, v, out, scale, causal);
  return cudaGetLastError();
}
"""

_CPP_SRC = r"""
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

constexpr int B_r = 32, B_c = 64, D = 64;

struct View {  // a tensor, as common.build passes it; sizes and strides count elements
  float* data;
  int64_t sizes[4], strides[4];
  float* row(int b, int i, int h) const { return data + b * strides[0] + i * strides[1] + h * strides[2]; }
};

typedef float Row[B_r];  // one number of each query: tiles are transposed, so a vector is one number of several
struct Tiles {
  Row Q[D], O[D], S[B_c], m, l, shift, rescale;
};

// e^x for x <= 0; 0 from -88 on. x log2(e) is n + f with an integer n and |f| <= 1/2: a series for 2^f, and n goes into
// the exponent. A call of std::exp for each number would keep its loop from being vectorised.
static inline float exponential(float x) {
  const float y = std::max(x * 1.44269504f, -127.0f), n = std::nearbyint(y), f = y - n;
  float p = 1.5353362e-4f;
  for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503325e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) p = p * f + c;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// N rows of C += A B, with A(r, t) = a[r * row + t * column]. The sums stay in registers: 4 rows are 16 vectors of AVX.
template <int N>
static inline void product(Row* C, const float* a, int64_t row, int64_t column, const Row* B, int length) {
  Row sum[N] = {};
  for (int t = 0; t < length; ++t)
    for (int r = 0; r < N; ++r)
      for (int i = 0; i < B_r; ++i) sum[r][i] += a[r * row + t * column] * B[t][i];
  for (int r = 0; r < N; ++r)
    for (int i = 0; i < B_r; ++i) C[r][i] += sum[r][i];
}

static void products(Row* C, int rows, const float* a, int64_t row, int64_t column, const Row* B, int length) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) product<4>(C + r, a + r * row, row, column, B, length);
  for (; r < rows; ++r) product<1>(C + r, a + r * row, row, column, B, length);
}

// m, l and O after one more tile of keys, which are S's rows
static void online_softmax(Tiles& t, int cols, int head_dim) {  // line 9
  Row m;
  for (int i = 0; i < B_r; ++i) m[i] = t.m[i];
  for (int j = 0; j < cols; ++j)
    for (int i = 0; i < B_r; ++i) m[i] = std::max(m[i], t.S[j][i]);
  for (int i = 0; i < B_r; ++i) {
    t.shift[i] = m[i] == -INFINITY ? 0.0f : m[i];  // no key so far: -inf - -inf would be NaN
    t.rescale[i] = exponential(t.m[i] - t.shift[i]);
    t.l[i] *= t.rescale[i];
    t.m[i] = m[i];
  }
  for (int j = 0; j < cols; ++j)
    for (int i = 0; i < B_r; ++i) t.l[i] += t.S[j][i] = exponential(t.S[j][i] - t.shift[i]);
  for (int e = 0; e < head_dim; ++e)
    for (int i = 0; i < B_r; ++i) t.O[e][i] *= t.rescale[i];
}

static void attend(Tiles& t, View q, View k, View v, View out, int b, int h, int row_0, float scale, bool causal) {
  const int q_len = q.sizes[1], kv_len = k.sizes[1], head_dim = q.sizes[3], kv_head = h / (q.sizes[2] / k.sizes[2]);
  const int rows = std::min(B_r, q_len - row_0), diagonal = kv_len - q_len;
  t = {};
  for (int i = 0; i < B_r; ++i) t.m[i] = -INFINITY;
  for (int i = 0; i < rows; ++i)
    for (int e = 0; e < head_dim; ++e) t.Q[e][i] = scale * q.row(b, row_0 + i, h)[e];

  const int end = causal ? std::min(kv_len, row_0 + rows + diagonal) : kv_len;  // no row sees a key after it
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {  // line 6
    const int cols = std::min(B_c, end - col_0);
    std::memset(t.S, 0, sizeof t.S);
    products(t.S, cols, k.row(b, col_0, kv_head), k.strides[1], 1, t.Q, head_dim);  // line 8
    for (int j = 0; causal && j < cols; ++j)
      for (int i = 0; i < B_r; ++i) t.S[j][i] = col_0 + j <= row_0 + i + diagonal ? t.S[j][i] : -INFINITY;
    online_softmax(t, cols, head_dim);
    products(t.O, head_dim, v.row(b, col_0, kv_head), 1, v.strides[1], t.S, cols);  // line 10
  }
  for (int i = 0; i < rows; ++i)  // line 12
    for (int e = 0; e < head_dim; ++e) out.row(b, row_0 + i, h)[e] = t.l[i] == 0.0f ? 0.0f : t.O[e][i] / t.l[i];
}

extern "C" int attention(View q, View k, View v, View out, float scale, int causal, int threads) {
  const int heads = q.sizes[2], tiles = (q.sizes[1] + B_r - 1) / B_r, all = q.sizes[0] * heads * tiles;
  std::atomic<int> next{0};
  auto work = [&] {
    Tiles scratch;
    for (int n; (n = next++) < all;) {
      const int h = n / tiles % heads, row_0 = (tiles - 1 - n % tiles) * B_r;  // causal: the longest rows first
      attend(scratch, q, k, v, out, n / tiles / heads, h, row_0, scale, causal);
    }
  };
  std::vector<std::thread> others(std::max(0, std::min(threads, all) - 1));
  for (auto& thread : others) thread = std::thread(work);
  work();
  for (auto& thread : others) thread.join();
  return 0;
}
"""

_cuda = Kernels.from_text(__file__, _CUDA_SRC, ".cu")
_cpp = Kernels.from_text(__file__, _CPP_SRC, ".cpp")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cuda: bool | None = None,
) -> Tensor:
    """softmax(scale q k^T) v in one kernel, with scores in tiles.

    Args:
        q, k, v, causal, scale: as :func:`task4.attention.flash_attention`'s, float32, head_dim at most 64.
        cuda: by ``_CUDA_SRC``, on a GPU or a CPU, or by ``_CPP_SRC``, on a CPU; None: the one for q's device.

    Returns:
        ``(batch, q_len, heads, head_dim)`` float32. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit.
        BuildError: the source does not compile.
    """
    batch, heads, _, q_len, kv_len, head_dim = check_attention(q, k, v, (torch.float32,), 64)
    out = torch.empty((batch, q_len, heads, head_dim), device=q.device)
    if not kv_len or not out.numel():
        return out.zero_()
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    arguments = {"q": q, "k": k, "v": v, "out": out, "scale": scale, "causal": causal}
    if q.is_cuda if cuda is None else cuda:
        _cuda.launch("attention", **arguments)
    else:
        _cpp.query("attention", q.device, **arguments, threads=torch.get_num_threads())
    return out


def bytes_moved(heads: int, S: int, D: int) -> int:
    """What the kernel reads and writes at least: Q, K, V and O, once each."""
    return 4 * heads * 4 * S * D
