// Calls whose arguments have been checked before, from torch's tensors to the launcher without Python code: that is a
// third of what a call costs the host. known_calls.py is the Python side.
//
// A call is known by the shapes, strides, dtypes, devices and alignment of q, k and v, and by a number for all other
// arguments. Python's lock is held, but for the launch.
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "dlpack.h"

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
  int64_t number;
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

static int (*current_device)(int*);                // the driver's cuCtxGetDevice
static int (*is_capturing)(void* stream, int* on);  // cuStreamIsCapturing
static std::unordered_map<Key, Call, Hash, Equal> calls;
static std::map<std::pair<int, void*>, void*> counters;  // of a GPU's stream

static Layout layout(const DLTensor& tensor) {
  Layout found;
  std::memcpy(found.sizes, tensor.sizes, sizeof(found.sizes));
  std::memcpy(found.strides, tensor.strides, sizeof(found.strides));
  found.device = tensor.device, found.dtype = tensor.dtype;
  found.alignment = reinterpret_cast<uintptr_t>(tensor.address()) % 16;
  return found;
}

static bool read_key(PyObject* const (&objects)[3], int64_t number, DLTensor (&tensors)[3], Key& key) {
  for (int i = 0; i < 3; ++i)
    if (!read(objects[i], tensors[i]) || tensors[i].ndim != 4) return false;
  key = {layout(tensors[0]), layout(tensors[1]), layout(tensors[2]), number};
  return true;
}

// Launches, and returns the launcher's status. WANTS_WORKSPACE: to be called again with one. UNKNOWN: Python has to
// make this call, because it is not known, the GPU is not the current one, or the stream has no counter.
static int launch(PyObject* q, PyObject* k, PyObject* v, PyObject* out, void* workspace, int64_t number) {
  DLTensor tensors[3], result;
  Key key;
  if (!read_key({q, k, v}, number, tensors, key) || !read(out, result)) return UNKNOWN;
  const auto found = calls.find(key);
  if (found == calls.end()) return UNKNOWN;
  const Call call = found->second;
  const DLDevice device = key.q.device;
  int current;
  if (current_device(&current) || current != device.id) return UNKNOWN;
  void* stream;
  if (exchange_api->current_stream(device.type, device.id, &stream)) return PyErr_Clear(), UNKNOWN;
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
  const int status = call.launcher(view_of(tensors[0]), view_of(tensors[1]), view_of(tensors[2]), view_of(result),
                                   workspace, call.scale, call.causal, call.dtype, stream);
  PyEval_RestoreThread(thread);
  return status;
}

// launch(q, k, v, out, address of the workspace or 0, number)
static PyObject* launch(PyObject*, PyObject* const* a, intptr_t) {
  return PyLong_FromLong(launch(a[0], a[1], a[2], a[3], PyLong_AsVoidPtr(a[4]), PyLong_AsLongLong(a[5])));
}

extern "C" {

PyObject* function() {
  static PyMethodDef definition = {"launch", launch, METH_FASTCALL, "See known_calls.cpp."};
  return PyCFunction_NewEx(&definition, nullptr, nullptr);
}

void init(void* cuCtxGetDevice, void* cuStreamIsCapturing) {
  current_device = reinterpret_cast<decltype(current_device)>(cuCtxGetDevice);
  is_capturing = reinterpret_cast<decltype(is_capturing)>(cuStreamIsCapturing);
}

void add(PyObject* q, PyObject* k, PyObject* v, int64_t number, void* launcher, float scale, int causal, int dtype,
         int counted, int64_t workspace_bytes) {
  DLTensor tensors[3];
  Key key;
  if (!read_key({q, k, v}, number, tensors, key)) return;
  if (calls.size() >= 4096) calls.clear();
  calls[key] = {reinterpret_cast<Launcher>(launcher), scale, causal, dtype, counted != 0, workspace_bytes};
}

// An int on that GPU which is 0, for the launches on this stream.
void add_counter(int device, void* stream, void* counter) { counters[{device, stream}] = counter; }

// How many bytes of workspace a call wants; a counter is none. -1 if the call is not known.
int64_t workspace_bytes(PyObject* q, PyObject* k, PyObject* v, int64_t number) {
  DLTensor tensors[3];
  Key key;
  if (!read_key({q, k, v}, number, tensors, key)) return -1;
  const auto found = calls.find(key);
  return found == calls.end() ? -1 : found->second.workspace_bytes;
}
}
