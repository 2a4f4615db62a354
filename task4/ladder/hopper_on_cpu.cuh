// The functions of hopper.cuh without a GPU. The CPU layer runs them, with checks that the hardware does not make.
#pragma once

DEVICE uint32_t shared_address(const void* p) { return cuda_on_cpu::offset_in_shared(p); }

DEVICE void may_be_anything(void* shared, int bytes) { cuda_on_cpu::may_be_anything(shared, size_t(bytes)); }

// ---- mbarrier

DEVICE void mbarrier_init(uint64_t* barrier, int arrivals, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::mbarrier_init(barrier, arrivals, file, line);
}
DEVICE void mbarrier_init_fence() {}
DEVICE void mbarrier_arrive(uint64_t* barrier, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::mbarrier_arrive(barrier, 0, file, line);
}
DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::mbarrier_arrive(barrier, bytes, file, line);
}
DEVICE void mbarrier_wait(uint64_t* barrier, int parity, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::mbarrier_wait(barrier, parity, file, line);
}

// ---- TMA

constexpr uint64_t EVICT_NORMAL = 0, EVICT_FIRST = 0, EVICT_LAST = 0;

DEVICE void tma_prefetch(const CUtensorMap*) {}
DEVICE void tma_load_box(void* tile, const CUtensorMap* map, uint64_t* barrier, int c1, int c2, int c3, int c4,
                         CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::tensor_load(tile, map, {0, c1, c2, c3, c4}, barrier, file, line);
}
DEVICE void tma_prefetch_box(const CUtensorMap*, int, int, int, int) {}
DEVICE void tma_load(void* tile, const CUtensorMap* map, uint64_t* barrier, int row, int head, int b,
                     uint64_t = EVICT_NORMAL, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::tensor_load(tile, map, {0, row, 0, head, b}, barrier, file, line);
}
DEVICE void tma_store(const CUtensorMap* map, const void* tile, int row, int head, int b, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::tensor_store(map, tile, {0, row, 0, head, b}, file, line);
}
DEVICE void tma_store_wait() { cuda_on_cpu::tensor_store_wait(); }
DEVICE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::bulk_load(to, from, unsigned(bytes), barrier, file, line);
}
DEVICE void fence_async_proxy() {}

// ---- stmatrix

DEVICE void store_matrices(uint32_t row, const uint32_t (&x)[4], CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::stmatrix(4, false, row, x, file, line);
}
DEVICE void store_transposed(uint32_t row, uint32_t x, uint32_t y, CUDA_ON_CPU_CALLER) {
  const uint32_t registers[2] = {x, y};
  cuda_on_cpu::stmatrix(2, true, row, registers, file, line);
}

// ---- Warpgroups

template <int Registers>
DEVICE void registers_give() {}
template <int Registers>
DEVICE void registers_take() {}
DEVICE void barrier_sync(int id, int threads, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::named_barrier(id, threads, true, file, line);
}
DEVICE void barrier_arrive(int id, int threads, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::named_barrier(id, threads, false, file, line);
}

// ---- wgmma

DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit(CUDA_ON_CPU_CALLER) { cuda_on_cpu::wgmma_commit(file, line); }
template <int Groups>
DEVICE void wgmma_wait(CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::wgmma_wait(Groups, file, line);
}
template <typename T, int N>
DEVICE void keep_here(T (&)[N]) {}

template <typename T>
constexpr cuda_on_cpu::MmaType WGMMA_TYPE =
    std::is_same_v<T, __half> ? cuda_on_cpu::MmaType::f16 : cuda_on_cpu::MmaType::bf16;

template <typename T, int N, int TRANS_B>
struct Wgmma {
  DEVICE static void run(float (&d)[N / 2], uint32_t a, uint32_t b, int add = 1, CUDA_ON_CPU_CALLER) {
    cuda_on_cpu::wgmma({WGMMA_TYPE<T>, N, add != 0, false, TRANS_B != 0, a, b, nullptr}, d, file, line);
  }
  DEVICE static void run(float (&d)[N / 2], const uint32_t* a, uint32_t b, int add = 1, CUDA_ON_CPU_CALLER) {
    cuda_on_cpu::wgmma({WGMMA_TYPE<T>, N, add != 0, false, TRANS_B != 0, 0, b, a}, d, file, line);
  }
};
