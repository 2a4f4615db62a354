// What the cores of this machine reach: reading memory, and fused multiply-adds in registers.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, CHAINS = 16;
#elif defined(__AVX__)
constexpr int LANES = 8, CHAINS = 12;  // of 16 registers
#else
constexpr int LANES = 4, CHAINS = 16;  // NEON
#endif
// CHAINS sums do not wait for each other: two units that take 4 cycles each need 8 of them, four units 16. More than 16
// would be a loop over memory: g++ unrolls no further.

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

template <typename Work>
static void on_threads(int threads, Work work) {
  std::vector<std::thread> others(std::max(0, threads - 1));
  for (int t = 1; t < threads; ++t) others[t - 1] = std::thread(work, t);
  work(0);
  for (auto& thread : others) thread.join();
}

// The sum of the numbers that a thread has read goes to sums[thread]: without it there would be nothing to read for.
static void store(const Vector* sum, float* to) {
  *to = 0.0f;
  for (int c = 0; c < CHAINS; ++c)
    for (int i = 0; i < LANES; ++i) *to += sum[c][i];
}

// Reads n floats so many times, each thread an equal part of them; returns how many floats are read at a time.
extern "C" int64_t read_memory(const float* data, int64_t n, int times, int threads, float* sums) {
  const int64_t step = CHAINS * LANES, part = n / threads / step * step;
  on_threads(threads, [=](int thread) {
    const float* begin = data + thread * part;
    Vector sum[CHAINS] = {};
    for (int i = 0; i < times; ++i) {
      asm volatile("" ::: "memory");  // or the compiler would read once
      for (const float* x = begin; x < begin + part; x += step)
        for (int c = 0; c < CHAINS; ++c) sum[c] += *reinterpret_cast<const Unaligned*>(x + c * LANES);
    }
    store(sum, sums + thread);
  });
  return part * threads;
}

// x = a x + b, so many times in each thread; returns how many FLOPs that is in each thread and time.
extern "C" int multiply_add(float a, float b, int64_t times, int threads, float* sums) {
  on_threads(threads, [=](int thread) {
    Vector sum[CHAINS];
    for (int c = 0; c < CHAINS; ++c) sum[c] = Vector{} + float(c);  // equal ones would be computed once
    for (int64_t i = 0; i < times; ++i)
      for (int c = 0; c < CHAINS; ++c) sum[c] = sum[c] * a + b;
    store(sum, sums + thread);
  });
  return 2 * CHAINS * LANES;
}
