// Calls whose arguments have been checked before, from torch's tensors to the launcher without Python code: that is a
// third of what a call costs the host. known_calls.py is the Python side.
//
// A call is known by the shapes, strides, dtypes, devices and alignment of q, k and v, and by a number for all other
// arguments. Tensors are read through DLPack's C exchange API (dlpack.h of DLPack 1.3), which torch has from 2.11 on.
// Python's lock is held but for the launch.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

// ---- DLPack

struct DLDevice {
  int32_t type, id;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  uint32_t dtype;  // code, bits and lanes
  int64_t *sizes, *strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  void *previous, *allocate, *from_object, *to_object;
  int (*read)(void* object, DLTensor*);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

// ---- Python

extern "C" {
void PyErr_Clear();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

// ---- Calls

struct View {  // as in tensor.cuh
  void* data;
  int64_t sizes[4], strides[4];
};

using Launcher = int (*)(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                         void* stream);

struct Call {
  Launcher launcher;
  float scale;
  int causal, dtype;
  bool counted;             // the workspace is a counter
  int64_t workspace_bytes;  // otherwise
};

struct Layout {
  int64_t sizes[4], strides[4];
  DLDevice device;
  uint32_t dtype, alignment;  // of the address: the part of it below 16
};

constexpr int UNKNOWN = -1, WANTS_WORKSPACE = -2;

struct Key {
  Layout q, k, v;
  int64_t options;
};

struct Hash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof(Key)});
  }
};

struct Equal {
  bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof(Key)) == 0; }
};
static_assert(sizeof(Key) == 3 * sizeof(Layout) + 8 && sizeof(Layout) == 80, "no padding: keys are compared as bytes");

static const ExchangeApi* api;
static int (*current_device)(int*);                // the driver's cuCtxGetDevice
static int (*is_capturing)(void* stream, int* on);  // cuStreamIsCapturing
static std::unordered_map<Key, Call, Hash, Equal> calls;
static std::map<std::pair<int, void*>, void*> counters;  // of a GPU's stream

static bool read(void* object, DLTensor& tensor) {
  if (api->read(object, &tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

static void* address(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

static Layout layout(const DLTensor& tensor) {
  Layout found;
  std::memcpy(found.sizes, tensor.sizes, sizeof(found.sizes));
  std::memcpy(found.strides, tensor.strides, sizeof(found.strides));
  found.device = tensor.device, found.dtype = tensor.dtype;
  found.alignment = reinterpret_cast<uintptr_t>(address(tensor)) % 16;
  return found;
}

static View view(const DLTensor& tensor) {
  View view;
  view.data = address(tensor);
  for (int i = 0; i < 4; ++i) {
    view.sizes[i] = tensor.sizes[i];
    view.strides[i] = tensor.sizes[i] != 1 ? tensor.strides[i] : 0;
  }
  return view;
}

static bool read_key(void* const (&objects)[3], int64_t options, DLTensor (&tensors)[3], Key& key) {
  for (int i = 0; i < 3; ++i)
    if (!read(objects[i], tensors[i]) || tensors[i].ndim != 4) return false;
  key = {layout(tensors[0]), layout(tensors[1]), layout(tensors[2]), options};
  return true;
}

extern "C" {

// Returns whether this version of DLPack is known.
int known_calls_init(const void* exchange_api, void* cuCtxGetDevice, void* cuStreamIsCapturing) {
  api = static_cast<const ExchangeApi*>(exchange_api);
  current_device = reinterpret_cast<decltype(current_device)>(cuCtxGetDevice);
  is_capturing = reinterpret_cast<decltype(is_capturing)>(cuStreamIsCapturing);
  return api->major == 1 && api->read;
}

void known_calls_add(void* q, void* k, void* v, int64_t options, void* launcher, float scale, int causal, int dtype,
                     int counted, int64_t workspace_bytes) {
  DLTensor tensors[3];
  Key key;
  if (!read_key({q, k, v}, options, tensors, key)) return;
  if (calls.size() >= 4096) calls.clear();
  calls[key] = {reinterpret_cast<Launcher>(launcher), scale, causal, dtype, counted != 0, workspace_bytes};
}

// An int on that GPU which is 0, for the launches on this stream.
void known_calls_add_counter(int device, void* stream, void* counter) { counters[{device, stream}] = counter; }

// How many bytes of workspace a call wants; a counter is none. -1 if the call is not known.
int64_t known_calls_workspace_bytes(void* q, void* k, void* v, int64_t options) {
  DLTensor tensors[3];
  Key key;
  if (!read_key({q, k, v}, options, tensors, key)) return -1;
  const auto found = calls.find(key);
  return found == calls.end() ? -1 : found->second.workspace_bytes;
}

// Launches, and returns the launcher's status. WANTS_WORKSPACE: to be called again with one. UNKNOWN: Python has to
// make this call, because it is not known, the GPU is not the current one, or the stream has no counter.
int known_calls_launch(void* q, void* k, void* v, void* out, void* workspace, int64_t options) {
  DLTensor tensors[3], result;
  Key key;
  if (!read_key({q, k, v}, options, tensors, key) || !read(out, result)) return UNKNOWN;
  const auto found = calls.find(key);
  if (found == calls.end()) return UNKNOWN;
  const Call call = found->second;
  const DLDevice device = key.q.device;
  int current;
  if (current_device(&current) || current != device.id) return UNKNOWN;
  void* stream;
  if (api->current_stream(device.type, device.id, &stream)) return PyErr_Clear(), UNKNOWN;
  if (call.counted) {
    int capturing;  // a CUDA graph has counters of its own
    if (is_capturing(stream, &capturing) || capturing) return UNKNOWN;
    const auto its = counters.find({device.id, stream});
    if (its == counters.end()) return UNKNOWN;
    workspace = its->second;
  } else if (call.workspace_bytes && !workspace) {
    return WANTS_WORKSPACE;
  }
  void* const thread = PyEval_SaveThread();
  const int status = call.launcher(view(tensors[0]), view(tensors[1]), view(tensors[2]), view(result), workspace,
                                   call.scale, call.causal, call.dtype, stream);
  PyEval_RestoreThread(thread);
  return status;
}
}
