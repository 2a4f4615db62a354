// What the blocks of a cluster share: a barrier, and stores to each other's shared memory. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

// Where each of 1 << bits blocks sends the others m and l of all rows, and of the quads (four columns of a row) the
// first to block 0, the second to block 1, and so on: the bytes that block `rank` gets.
DEVICE int received_bytes(int rows, int columns, int bits, int rank) {
  const int quads = (rows * (columns / 4) - rank + (1 << bits) - 1) >> bits;
  return (quads * int(sizeof(float4)) + rows * int(sizeof(float2))) << bits;
}

#ifdef __CUDACC__

// The threads of a cluster meet: no thread passes wait_for_cluster() before all have passed arrive_in_cluster(); what
// they wrote before is visible after.
DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of the same variable of block `rank`.
DEVICE uint32_t of_block(const void* variable, int rank) {
  const uint32_t own = uint32_t(__cvta_generic_to_shared(variable));
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  return address;
}
DEVICE void store_to(int rank, float4* to, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(of_block(to, rank)), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w) : "memory");
}
DEVICE void store_to(int rank, float2* to, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(of_block(to, rank)), "f"(x.x), "f"(x.y) : "memory");
}

// The same variable of block `rank`; zeros, and nothing is read, if not `inside`.
DEVICE float4 load_from(int rank, const float4* from, bool inside) {
  float4 x = {};
  asm volatile("{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\n"
               "@inside ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w) : "r"(of_block(from, rank)), "r"(int(inside)) : "memory");
  return x;
}
// x if not inside.
DEVICE float2 load_from(int rank, const float2* from, bool inside = true, float2 x = {}) {
  asm volatile("{\n.reg .pred inside;\nsetp.ne.b32 inside, %3, 0;\n"
               "@inside ld.shared::cluster.v2.f32 {%0, %1}, [%2];\n}"
               : "+f"(x.x), "+f"(x.y) : "r"(of_block(from, rank)), "r"(int(inside)) : "memory");
  return x;
}

// As arrive_in_cluster(), but what was written before is not made visible.
DEVICE void start_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// Stores that nobody waits for but the block `rank`: its mbarrier counts their bytes.
DEVICE void send_to(int rank, float4* to, float4 x, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   of_block(to, rank)),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(of_block(barrier, rank)) : "memory");
}
DEVICE void send_to(int rank, float2* to, float2 x, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   of_block(to, rank)),
               "f"(x.x), "f"(x.y), "r"(of_block(barrier, rank)) : "memory");
}

#else

DEVICE void arrive_in_cluster(CUDA_ON_CPU_CALLER) { cuda_on_cpu::cluster_arrive(file, line); }
DEVICE void wait_for_cluster(CUDA_ON_CPU_CALLER) { cuda_on_cpu::cluster_wait(file, line); }
DEVICE void start_in_cluster(CUDA_ON_CPU_CALLER) { cuda_on_cpu::cluster_arrive(file, line); }
template <typename T>
DEVICE void store_to(int rank, T* to, T x, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::cluster_store(rank, to, &x, sizeof(x), nullptr, file, line);
}
inline float4 load_from(int rank, const float4* from, bool inside, CUDA_ON_CPU_CALLER) {
  float4 x = {};
  if (inside) cuda_on_cpu::cluster_load(rank, from, &x, sizeof(x), file, line);
  return x;
}
inline float2 load_from(int rank, const float2* from, bool inside = true, float2 x = {}, CUDA_ON_CPU_CALLER) {
  if (inside) cuda_on_cpu::cluster_load(rank, from, &x, sizeof(x), file, line);
  return x;
}
template <typename T>
DEVICE void send_to(int rank, T* to, T x, uint64_t* barrier, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::cluster_store(rank, to, &x, sizeof(x), barrier, file, line);
}

#endif
