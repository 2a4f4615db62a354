// The three steps of naive.cpp, each by itself, to be timed.
#include "../../../task4/frontends/naive.cpp"

template <typename Step>
static int each_head(const View& scores, Step step) {
  for (int b = 0; b < scores.sizes[0]; ++b)
    for (int h = 0; h < scores.sizes[1]; ++h) step(at<float>(scores, b, h, 0, 0), b, h);
  return 0;
}

// q, k, v, out (batch, seq, heads, head_dim)   scores_of (batch, heads, q_len, kv_len), contiguous
extern "C" int step_scores(View q, View k, View scores_of, float scale) {
  return each_head(scores_of, [&](float* S, int b, int h) { scores(q, k, S, b, h, scale); });
}

extern "C" int step_softmax(View scores_of) {
  return each_head(scores_of, [&](float* S, int, int) { softmax(S, scores_of.sizes[2], scores_of.sizes[3], false); });
}

extern "C" int step_product(View scores_of, View v, View out) {
  return each_head(scores_of, [&](float* P, int b, int h) { weighted(P, v, out, b, h); });
}
