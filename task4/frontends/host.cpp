// FlashAttention-2 on a CPU. [FA2] arXiv:2307.08691, Algorithm 1.
//
// A thread takes B_r queries of one head at a time, as a block does on a GPU. Its registers hold a part of S_ij or of
// O_i, its first cache holds Q_i, O_i and P_ij, and tiles of K and V pass through. All of these are stored transposed:
// a vector is one number of LANES queries. So the softmax needs no sums across a vector, and K and V are read where
// they are, an element at a time, as the factor of a whole vector.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "elements.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#else
constexpr int LANES = 4, VECTORS = 4;  // NEON
#endif
constexpr int ROWS = 6;  // of S^T or O^T that are in registers at a time: 24 of 32 vectors, with AVX 12 of 16
constexpr int B_r = VECTORS * LANES, B_c = 10 * ROWS, MAX_HEAD_DIM = 256;
constexpr float LOG2_E = 1.44269504f, INF = std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
struct Row {  // one number of each query
  Vector at[VECTORS];
};

static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b if one is NaN

// 2^x for x <= 0; 0 from -127 on. x is n + f with an integer n and |f| <= 1/2. 2^f is the sum of a series, which loses
// 1e-7 of it, and n goes into the exponent of 2^n.
static inline Vector power_of_2(Vector x) {
  const Vector shift = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  x = larger(Vector{} - 127.0f, x);
  const Vector n = x + shift, f = x - (n - shift);
  Vector p = Vector{} + 1.5353362e-4f;
  for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503325e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) p = p * f + c;
  return p * (Vector)(((Integers)n << 23) + (127 << 23));
}

// N rows of C (+)= A B with A(r, i) = a[r * row + i * column], in registers from the first sum to the last.
template <int N, bool ADD>
static inline void product(Row* C, const float* a, int64_t row, int64_t column, const Row* B, int length) {
  Row sum[N];
  for (int r = 0; r < N; ++r) sum[r] = ADD ? C[r] : Row{};
  for (int i = 0; i < length; ++i)
    for (int r = 0; r < N; ++r)
      for (int c = 0; c < VECTORS; ++c) sum[r].at[c] += a[r * row + i * column] * B[i].at[c];
  for (int r = 0; r < N; ++r) C[r] = sum[r];
}

template <bool ADD>
static inline void products(Row* C, int rows, const float* a, int64_t row, int64_t column, const Row* B, int length) {
  int r = 0;
  for (; r + ROWS <= rows; r += ROWS) product<ROWS, ADD>(C + r, a + r * row, row, column, B, length);
  for (; r + 4 <= rows; r += 4) product<4, ADD>(C + r, a + r * row, row, column, B, length);
  for (; r < rows; ++r) product<1, ADD>(C + r, a + r * row, row, column, B, length);
}

struct Tiles {
  Row Q[MAX_HEAD_DIM], O[MAX_HEAD_DIM], S[B_c];  // transposed; S becomes P
  float K_V[B_c * MAX_HEAD_DIM];                 // 16-bit keys or values as floats
};

// Rows row_0 ... of one head. Row i sees the keys begin <= j < end, and if causal j <= i + diagonal.
template <typename T>
static void attend(Tiles& tiles, const T* q, const T* k, const T* v, T* out, const View& Q, const View& K,
                   const View& V, const View& Out, int row_0, int rows, int begin, int end, bool causal, int diagonal,
                   float scale) {
  const int head_dim = Q.sizes[3];
  for (int e = 0; e < head_dim; ++e)
    for (int i = 0; i < B_r; ++i)
      ((float*)&tiles.Q[e])[i] = i < rows ? to_float(q[i * Q.strides[1] + e]) * (scale * LOG2_E) : 0.0f;
  std::memset(tiles.O, 0, head_dim * sizeof(Row));
  Row m, l = {}, number;
  for (int i = 0; i < B_r; ++i) ((float*)&m)[i] = -INF, ((float*)&number)[i] = row_0 + i;

  if (causal) end = std::min(end, row_0 + rows + diagonal);
  for (int col_0 = begin; col_0 < end; col_0 += B_c) {  // line 6
    const int cols = std::min(B_c, end - col_0);
    int64_t stride = K.strides[1];
    const float* keys = as_floats(k + col_0 * stride, cols, head_dim, stride, tiles.K_V);
    products<false>(tiles.S, cols, keys, stride, 1, tiles.Q, head_dim);  // line 8
    if (causal && col_0 + cols - 1 > row_0 + diagonal)
      for (int j = 0; j < cols; ++j)
        for (int c = 0; c < VECTORS; ++c)
          tiles.S[j].at[c] = number.at[c] >= float(col_0 + j - diagonal) ? tiles.S[j].at[c] : Vector{} - INF;

    Row m_new = m, shift, rescale, sum = {};  // line 9
    for (int j = 0; j < cols; ++j)
      for (int c = 0; c < VECTORS; ++c) m_new.at[c] = larger(m_new.at[c], tiles.S[j].at[c]);
    for (int c = 0; c < VECTORS; ++c) {
      shift.at[c] = m_new.at[c] == -INF ? Vector{} : m_new.at[c];  // no key so far: -inf - -inf would be NaN
      rescale.at[c] = power_of_2(m.at[c] - shift.at[c]);
    }
    for (int j = 0; j < cols; ++j)
      for (int c = 0; c < VECTORS; ++c) sum.at[c] += tiles.S[j].at[c] = power_of_2(tiles.S[j].at[c] - shift.at[c]);
    for (int c = 0; c < VECTORS; ++c) l.at[c] = l.at[c] * rescale.at[c] + sum.at[c];
    if (std::memcmp(&m, &m_new, sizeof(Row)))
      for (int e = 0; e < head_dim; ++e)
        for (int c = 0; c < VECTORS; ++c) tiles.O[e].at[c] *= rescale.at[c];
    m = m_new;

    stride = V.strides[1];
    const float* values = as_floats(v + col_0 * stride, cols, head_dim, stride, tiles.K_V);
    products<true>(tiles.O, head_dim, values, 1, stride, tiles.S, cols);  // line 10
  }

  for (int i = 0; i < rows; ++i) {  // line 12
    const float sum = ((float*)&l)[i], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int e = 0; e < head_dim; ++e) from_float(((float*)&tiles.O[e])[i] * inverse, out[i * Out.strides[1] + e]);
  }
}

template <typename T>
static void flash_attention(View q, View k, View v, View out, const int* seqlens, const int* leftpad, float scale,
                            bool causal, int threads) {
  const int batch = q.sizes[0], q_len = q.sizes[1], heads = q.sizes[2], kv_len = k.sizes[1], group = heads / k.sizes[2];
  const int tiles = (q_len + B_r - 1) / B_r, all = batch * heads * tiles;
  std::atomic<int> next{0};
  auto work = [&] {
    auto scratch = std::make_unique<Tiles>();
    for (int i; (i = next++) < all;) {
      const int tile = tiles - 1 - i % tiles, h = i / tiles % heads, b = i / tiles / heads;  // the longest first
      const int row = tile * B_r, end = seqlens ? std::min(seqlens[b], kv_len) : kv_len;
      attend(*scratch, at<T>(q, b, row, h, 0), at<T>(k, b, 0, h / group, 0), at<T>(v, b, 0, h / group, 0),
             at<T>(out, b, row, h, 0), q, k, v, out, row, std::min(B_r, q_len - row),
             leftpad ? std::max(leftpad[b], 0) : 0, end, causal, end - q_len, scale);
    }
  };
  std::vector<std::thread> others(std::max(0, std::min(threads, all) - 1));
  for (auto& thread : others) thread = std::thread(work);
  work();
  for (auto& thread : others) thread.join();
}

extern "C" int flash_attention(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                               float scale, int causal, int dtype, int threads) {
  with_dtype(dtype, [&](auto element) {
    flash_attention<decltype(element)>(q, k, v, out, seqlens_k, leftpad_k, scale, causal, threads);
  });
  return 0;
}
