// Attention on a CPU in three steps, each of which writes its whole result to memory and reads the one before.
#include <cmath>
#include <limits>

#include "elements.h"

// S = scale q k^T, one number after the other
static void scores(const View& q, const View& k, float* S, int b, int h, float scale) {
  const int q_len = q.sizes[1], kv_len = k.sizes[1], head_dim = q.sizes[3], group = q.sizes[2] / k.sizes[2];
  for (int i = 0; i < q_len; ++i)
    for (int j = 0; j < kv_len; ++j) {
      float sum = 0.0f;
      for (int e = 0; e < head_dim; ++e) sum += *at<float>(q, b, i, h, e) * *at<float>(k, b, j, h / group, e);
      S[int64_t(i) * kv_len + j] = sum * scale;
    }
}

// P = softmax(S), in place; row i sees keys up to i + diagonal
static void softmax(float* S, int q_len, int kv_len, bool causal) {
  for (int i = 0; i < q_len; ++i) {
    float* row = S + int64_t(i) * kv_len;
    const int seen = causal ? std::max(0, std::min(kv_len, i + 1 + kv_len - q_len)) : kv_len;
    float m = -std::numeric_limits<float>::infinity(), l = 0.0f;
    for (int j = 0; j < seen; ++j) m = std::max(m, row[j]);
    for (int j = 0; j < seen; ++j) l += row[j] = std::exp(row[j] - m);
    for (int j = 0; j < kv_len; ++j) row[j] = j < seen ? row[j] / l : 0.0f;
  }
}

// O = P v
static void weighted(const float* P, const View& v, const View& out, int b, int h) {
  const int q_len = out.sizes[1], kv_len = v.sizes[1], head_dim = v.sizes[3], group = out.sizes[2] / v.sizes[2];
  for (int i = 0; i < q_len; ++i)
    for (int e = 0; e < head_dim; ++e) {
      float sum = 0.0f;
      for (int j = 0; j < kv_len; ++j) sum += P[int64_t(i) * kv_len + j] * *at<float>(v, b, j, h / group, e);
      *at<float>(out, b, i, h, e) = sum;
    }
}

// scores: (batch, heads, q_len, kv_len), where the first two steps leave theirs
extern "C" int naive_attention(View q, View k, View v, View out, View scores_of, float scale, int causal) {
  for (int b = 0; b < q.sizes[0]; ++b)
    for (int h = 0; h < q.sizes[2]; ++h) {
      float* S = at<float>(scores_of, b, h, 0, 0);
      scores(q, k, S, b, h, scale);
      softmax(S, q.sizes[1], k.sizes[1], causal);
      weighted(S, v, out, b, h);
    }
  return 0;
}
