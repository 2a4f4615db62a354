// Copies between global and shared memory that one thread starts: of bytes, or of a box of a tensor (TMA).
#include <cstring>

#include "../include/cuda.h"
#include "checker.h"
#include "mbarrier.h"

namespace cuda_on_cpu {
namespace {

/// What a CUtensorMap holds here. Dimension 0 is the one without a pitch.
struct TensorMap {
  const char* data;
  uint64_t pitches[4];  // in bytes, of the others
  uint32_t sizes[5];
  uint16_t box[5];
  uint8_t element_bytes, swizzled;

  unsigned row_bytes() const { return unsigned(box[0]) * element_bytes; }
  unsigned rows() const { return unsigned(box[1]) * box[2] * box[3] * box[4]; }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "it fits");

/// The part of a box's row that is inside the tensor.
struct Row {
  char* global;      // its first element that is inside the tensor
  unsigned begin, end;  // bytes of the row that are inside
};

Row row_of(const TensorMap& map, const int (&at)[5], unsigned row) {
  char* address = const_cast<char*>(map.data);
  bool inside = true;
  for (int i = 1; i < 5; ++i) {
    const int64_t index = int64_t(at[i]) + row % map.box[i];
    row /= map.box[i];
    inside &= index >= 0 && index < int64_t(map.sizes[i]);
    address += index * int64_t(map.pitches[i - 1]);
  }
  const int64_t size = map.element_bytes;
  const int64_t begin = std::max<int64_t>(0, -int64_t(at[0])) * size;
  const int64_t end = std::min<int64_t>(map.box[0], int64_t(map.sizes[0]) - at[0]) * size;
  if (!inside || begin >= end) return {nullptr, 0, 0};
  return {address + at[0] * size + begin, unsigned(begin), unsigned(end)};
}

/// 16-byte chunk c of the 128 bytes that begin at r * 128 is stored as chunk c ^ r % 8. `offset`: in shared memory.
size_t swizzled(size_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

/// Calls use(global bytes, shared bytes, how many) for pieces of a row that are whole in both.
template <class Use>
void each_piece(const TensorMap& map, const Row& row, char* shared, unsigned row_number, Use use) {
  SharedMemory& memory = this_worker->shared;
  const size_t first = memory.offset(reinterpret_cast<uintptr_t>(shared)) + size_t(row_number) * map.row_bytes();
  char* arena = shared - memory.offset(reinterpret_cast<uintptr_t>(shared));
  for (unsigned at = row.begin; at < row.end;) {
    const unsigned count = std::min(row.end, (at / 16 + 1) * 16) - at;
    const size_t offset = first + at;
    use(row.global + (at - row.begin), arena + (map.swizzled ? swizzled(offset) : offset), count);
    at += count;
  }
}

void check_shared(const char* operation, const void* shared, unsigned alignment, const char* file, int line) {
  Worker& worker = *this_worker;
  const uintptr_t address = reinterpret_cast<uintptr_t>(shared);
  if (!worker.shared.contains(address))
    worker.fail(cudaErrorIllegalAddress, format("%s: the tile is not in shared memory", operation),
                format("%s:%d", file, line));
  if (worker.shared.offset(address) % alignment != 0)
    worker.fail(cudaErrorMisalignedAddress,
                format("%s: the address in shared memory is not a multiple of %u bytes", operation, alignment),
                format("%s:%d", file, line));
}

bool is_checked() { return this_worker->launch->site.checked; }

void check_box(const TensorMap& map, const int (&at)[5], Access access, const void* pc) {
  for (unsigned i = 0; i < map.rows(); ++i) {
    const Row row = row_of(map, at, i);
    if (row.end > row.begin) check_access(row.global, row.end - row.begin, access, pc);
  }
}

}  // namespace

void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* barrier, const char* file, int line) {
  Worker& worker = *this_worker;
  check_shared("bulk_load", shared, 16, file, line);
  check_mbarrier(barrier, "bulk_load", __builtin_return_address(0), file, line);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0)
    worker.fail(cudaErrorMisalignedAddress,
                format("bulk_load: the global address and the number of bytes, %u, must be multiples of 16", bytes),
                format("%s:%d", file, line));
  if (is_checked()) {
    check_access(global, bytes, Access::read, __builtin_return_address(0));
    check_access(shared, bytes, Access::copy_in_flight, __builtin_return_address(0));
  }
  worker.start_copy({[=] { std::memcpy(shared, global, bytes); }, shared, bytes, barrier, file, line});
}

void tensor_load(void* shared, const void* of, const int (&at)[5], uint64_t* barrier, const char* file, int line) {
  TensorMap map;
  std::memcpy(&map, of, sizeof map);
  const unsigned bytes = map.rows() * map.row_bytes();
  check_shared("tma_load", shared, 128, file, line);
  check_mbarrier(barrier, "tma_load", __builtin_return_address(0), file, line);
  if (is_checked()) {
    const void* pc = __builtin_return_address(0);
    check_box(map, at, Access::read, pc);
    check_access(shared, bytes, Access::copy_in_flight, pc);
  }
  const auto move = [=] {
    std::memset(shared, 0, bytes);
    for (unsigned i = 0; i < map.rows(); ++i)
      each_piece(map, row_of(map, at, i), static_cast<char*>(shared), i,
                 [](const char* global, char* to, unsigned count) { std::memcpy(to, global, count); });
  };
  this_worker->start_copy({move, shared, bytes, barrier, file, line});
}

void tensor_store(const void* of, const void* shared, const int (&at)[5], const char* file, int line) {
  TensorMap map;
  std::memcpy(&map, of, sizeof map);
  check_shared("tma_store", shared, 128, file, line);
  if (is_checked()) {
    const void* pc = __builtin_return_address(0);
    check_access(shared, map.rows() * map.row_bytes(), Access::read, pc);
    check_box(map, at, Access::write, pc);
  }
  const auto move = [=] {
    for (unsigned i = 0; i < map.rows(); ++i)
      each_piece(map, row_of(map, at, i), static_cast<char*>(const_cast<void*>(shared)), i,
                 [](char* global, const char* from, unsigned count) { std::memcpy(global, from, count); });
  };
  if (this_worker->launch->settings.eager_copies) return move();
  this_worker->running().stores.push_back(move);
}

void tensor_store_wait() {
  std::vector<std::function<void()>>& stores = this_worker->running().stores;
  for (auto& store : stores) store();
  stores.clear();
}

void may_be_anything(void* shared, size_t bytes) {
  if (is_checked()) check_access(shared, bytes, Access::write, __builtin_return_address(0));
}

uint32_t offset_in_shared(const void* shared) {
  return uint32_t(this_worker->shared.offset(reinterpret_cast<uintptr_t>(shared)));
}

}  // namespace cuda_on_cpu

/// As the driver's: refuses what TMA does not take.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr uint64_t kMostSize = uint64_t(1) << 32, kMostPitch = uint64_t(1) << 40;
  const auto refuse = [](const std::string& why) {
    cuda_on_cpu::set_host_error(cudaErrorInvalidValue, "cuTensorMapEncodeTiled: " + why);
    return CUDA_ERROR_INVALID_VALUE;
  };
  cuda_on_cpu::TensorMap result = {};
  result.data = static_cast<const char*>(data);
  result.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  result.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (rank != 5) return refuse(cuda_on_cpu::format("the CPU layer takes maps of 5 dimensions; got %u", rank));
  if (!data || reinterpret_cast<uintptr_t>(data) % 16 != 0) return refuse("the address must be a multiple of 16 bytes");
  for (int i = 0; i < 5; ++i) {
    if (sizes[i] < 1 || sizes[i] > kMostSize)
      return refuse(cuda_on_cpu::format("size %d must be from 1 to 2^32; got %llu", i, (unsigned long long)sizes[i]));
    if (box[i] < 1 || box[i] > 256)
      return refuse(cuda_on_cpu::format("a box has from 1 to 256 elements of dimension %d; got %u", i, box[i]));
    if (steps[i] != 1) return refuse("the CPU layer takes steps of 1 alone");
    if (i > 0 && (pitches[i - 1] % 16 != 0 || pitches[i - 1] >= kMostPitch))
      return refuse(cuda_on_cpu::format("pitch %d must be a multiple of 16 bytes below 2^40; got %llu", i - 1,
                                        (unsigned long long)pitches[i - 1]));
    result.sizes[i] = uint32_t(sizes[i]), result.box[i] = uint16_t(box[i]);
    if (i > 0) result.pitches[i - 1] = pitches[i - 1];
  }
  if (result.row_bytes() % 16 != 0 || (result.swizzled && result.row_bytes() > 128))
    return refuse(cuda_on_cpu::format("a row of a box must be a multiple of 16 bytes, and at most 128 where it is "
                                      "swizzled; got %u",
                                      result.row_bytes()));
  std::memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}
