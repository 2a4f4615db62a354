"""Attention as three kernels in one Python file. Each writes its whole result to memory, where the next one reads it.

scores    S = scale Q K^T     (batch, heads, q_len, kv_len)
softmax   P = softmax(S)      in place
product   O = P V             (batch, q_len, heads, head_dim)
"""

import math

import torch
from torch import Tensor

from common.build import Kernels
from common.inputs import check_attention

_CUDA_SRC = r"""
#include <cuda_runtime.h>

#include "tensor.cuh"

constexpr int T = 32;         // a block computes T x T numbers, a thread one of them
constexpr int ROWS = 4;       // of the softmax in a block, a warp each
constexpr unsigned ALL = ~0u;  // lanes of a warp

// Element e of row i of head h is row_of(x, b, i, h)[e].
__device__ float* row_of(const View& x, int b, int i, int h) {
  return x.as<float>() + b * x.strides[0] + i * x.strides[1] + h * x.strides[2];
}

__global__ void scores(View q, View k, float* S, float scale) {
  __shared__ float Q_i[T][T], K_j[T][T + 1];  // + 1: the threads of a warp read a column of K_j, in 32 different banks
  const int q_len = q.sizes[1], heads = q.sizes[2], head_dim = q.sizes[3], kv_len = k.sizes[1];
  const int b = blockIdx.x / heads, h = blockIdx.x % heads, kv_head = h / (heads / int(k.sizes[2]));
  const int tx = threadIdx.x, ty = threadIdx.y, i = blockIdx.y * T + ty, j_0 = blockIdx.z * T;
  float sum = 0.0f;
  for (int e = 0; e < head_dim; e += T) {
    const bool inside = e + tx < head_dim;
    Q_i[ty][tx] = inside && i < q_len ? row_of(q, b, i, h)[e + tx] : 0.0f;
    K_j[ty][tx] = inside && j_0 + ty < kv_len ? row_of(k, b, j_0 + ty, kv_head)[e + tx] : 0.0f;
    __syncthreads();  // both tiles complete before anyone reads them
    for (int c = 0; c < T; ++c) sum += Q_i[ty][c] * K_j[tx][c];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (i < q_len && j_0 + tx < kv_len) S[(int64_t(blockIdx.x) * q_len + i) * kv_len + j_0 + tx] = scale * sum;
}

// A warp has one row. Row i sees the keys up to i + kv_len - q_len if causal; a row without keys becomes 0.
__global__ void softmax(float* S, int64_t rows, int q_len, int kv_len, bool causal) {
  const int64_t row = blockIdx.x * int64_t(ROWS) + threadIdx.y;
  if (row >= rows) return;  // all of a warp
  float* P = S + row * kv_len;
  const int seen = causal ? max(0, min(kv_len, int(row % q_len) + 1 + kv_len - q_len)) : kv_len;
  float m = -INFINITY, l = 0.0f;
  for (int j = threadIdx.x; j < seen; j += 32) m = fmaxf(m, P[j]);
  for (int lane = 16; lane > 0; lane /= 2) m = fmaxf(m, __shfl_xor_sync(ALL, m, lane));
  for (int j = threadIdx.x; j < seen; j += 32) l += P[j] = expf(P[j] - m);
  for (int lane = 16; lane > 0; lane /= 2) l += __shfl_xor_sync(ALL, l, lane);
  for (int j = threadIdx.x; j < kv_len; j += 32) P[j] = j < seen ? P[j] / l : 0.0f;
}

__global__ void product(const float* P, View v, View out) {
  __shared__ float P_ij[T][T], V_j[T][T];
  const int q_len = out.sizes[1], heads = out.sizes[2], head_dim = out.sizes[3], kv_len = v.sizes[1];
  const int b = blockIdx.x / heads, h = blockIdx.x % heads, kv_head = h / (heads / int(v.sizes[2]));
  const int tx = threadIdx.x, ty = threadIdx.y, i = blockIdx.y * T + ty, e = blockIdx.z * T + tx;
  float sum = 0.0f;
  for (int j = 0; j < kv_len; j += T) {
    const bool inside = i < q_len && j + tx < kv_len;
    P_ij[ty][tx] = inside ? P[(int64_t(blockIdx.x) * q_len + i) * kv_len + j + tx] : 0.0f;
    V_j[ty][tx] = j + ty < kv_len && e < head_dim ? row_of(v, b, j + ty, kv_head)[e] : 0.0f;
    __syncthreads();  // both tiles complete before anyone reads them
    for (int c = 0; c < T; ++c) sum += P_ij[ty][c] * V_j[c][tx];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (i < q_len && e < head_dim) row_of(out, b, i, h)[e] = sum;
}

// S (batch, heads, q_len, kv_len), contiguous: room for the scores and then their softmax
extern "C" cudaError_t attention(View q, View k, View v, View out, float* S, float scale, int causal,
                                 cudaStream_t stream) {
  const int all = q.sizes[0] * q.sizes[2], q_len = q.sizes[1], kv_len = k.sizes[1], head_dim = q.sizes[3];
  const int64_t rows = int64_t(all) * q_len;
  const dim3 threads(T, T), of_S(all, ceil_div(q_len, T), ceil_div(kv_len, T));
  const dim3 of_O(all, ceil_div(q_len, T), ceil_div(head_dim, T));
  scores<<<of_S, threads, 0, stream>>>(q, k, S, scale);
  softmax<<<(rows + ROWS - 1) / ROWS, dim3(32, ROWS), 0, stream>>>(S, rows, q_len, kv_len, causal);
  product<<<of_O, threads, 0, stream>>>(S, v, out);
  return cudaGetLastError();
}
"""

_CPP_SRC = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

struct View {  // a tensor, as common.build passes it; sizes and strides count elements
  float* data;
  int64_t sizes[4], strides[4];
  float* row(int b, int i, int h) const { return data + b * strides[0] + i * strides[1] + h * strides[2]; }
};

// S = scale Q K^T. K^T is copied first: then neighbouring keys are neighbours in memory, and a vector has 16 of them.
static void scores(const View& q, const View& k, float* S, int b, int h, int kv_head, float scale) {
  const int q_len = q.sizes[1], kv_len = k.sizes[1], head_dim = q.sizes[3];
  std::vector<float> K_T(int64_t(head_dim) * kv_len);
  for (int j = 0; j < kv_len; ++j)
    for (int e = 0; e < head_dim; ++e) K_T[int64_t(e) * kv_len + j] = k.row(b, j, kv_head)[e];
  for (int i = 0; i < q_len; ++i) {
    float* S_i = S + int64_t(i) * kv_len;
    std::fill(S_i, S_i + kv_len, 0.0f);
    for (int e = 0; e < head_dim; ++e) {
      const float Q_ie = scale * q.row(b, i, h)[e], *K_e = &K_T[int64_t(e) * kv_len];
      for (int j = 0; j < kv_len; ++j) S_i[j] += Q_ie * K_e[j];
    }
  }
}

// P = softmax(S), in place. Row i sees the keys up to i + kv_len - q_len if causal; a row without keys becomes 0.
static void softmax(float* S, int q_len, int kv_len, bool causal) {
  for (int i = 0; i < q_len; ++i) {
    float* P = S + int64_t(i) * kv_len;
    const int seen = causal ? std::max(0, std::min(kv_len, i + 1 + kv_len - q_len)) : kv_len;
    float m = -INFINITY, l = 0.0f;
    for (int j = 0; j < seen; ++j) m = std::max(m, P[j]);
    for (int j = 0; j < seen; ++j) P[j] = std::exp(P[j] - m);
    for (int j = 0; j < seen; ++j) l += P[j];
    for (int j = 0; j < seen; ++j) P[j] /= l;
    for (int j = seen; j < kv_len; ++j) P[j] = 0.0f;
  }
}

// O = P V
static void product(const float* P, const View& v, const View& out, int b, int h, int kv_head) {
  const int q_len = out.sizes[1], head_dim = out.sizes[3], kv_len = v.sizes[1];
  for (int i = 0; i < q_len; ++i) {
    float* O_i = out.row(b, i, h);
    std::fill(O_i, O_i + head_dim, 0.0f);
    for (int j = 0; j < kv_len; ++j) {
      const float P_ij = P[int64_t(i) * kv_len + j], *V_j = v.row(b, j, kv_head);
      for (int e = 0; e < head_dim; ++e) O_i[e] += P_ij * V_j[e];
    }
  }
}

extern "C" int attention(View q, View k, View v, View out, float* S, float scale, int causal) {
  const int heads = q.sizes[2], group = heads / k.sizes[2];
  for (int b = 0; b < q.sizes[0]; ++b)
    for (int h = 0; h < heads; ++h, S += q.sizes[1] * k.sizes[1]) {
      scores(q, k, S, b, h, h / group, scale);
      softmax(S, q.sizes[1], k.sizes[1], causal);
      product(S, v, out, b, h, h / group);
    }
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
    """softmax(scale q k^T) v in three kernels, with all scores in memory.

    Args:
        q, k, v, causal, scale: as :func:`task4.attention.flash_attention`'s, float32, head_dim at most 128.
        cuda: by ``_CUDA_SRC``, on a GPU or a CPU, or by ``_CPP_SRC``, on a CPU; None: the one for q's device.

    Returns:
        ``(batch, q_len, heads, head_dim)`` float32. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit.
        BuildError: the source does not compile.
    """
    batch, heads, _, q_len, kv_len, head_dim = check_attention(q, k, v, (torch.float32,), 128)
    out = torch.empty((batch, q_len, heads, head_dim), device=q.device)
    if not kv_len or not out.numel():
        return out.zero_()
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    arguments = {"q": q, "k": k, "v": v, "out": out, "scale": scale, "causal": causal}
    arguments["S"] = torch.empty((batch, heads, q_len, kv_len), device=q.device)
    if q.is_cuda if cuda is None else cuda:
        _cuda.launch("attention", **arguments)
    else:
        _cpp.query("attention", q.device, **arguments)
    return out


def bytes_moved(heads: int, S: int, D: int) -> int:
    """What the kernels read and write at least: Q, K and S; S and P; P, V and O."""
    return 4 * heads * (4 * S * D + 4 * S * S)
