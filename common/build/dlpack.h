// For C++ code that Python calls with torch's tensors: what it needs of Python's stable ABI, and of DLPack's C exchange
// API (dlpack.h of DLPack 1.3), which torch has from 2.11 on. Neither Python's headers nor torch's have to be there.
#pragma once
#include <cstdint>
#include <cstring>

// ---- Python

struct PyObject {};  // never looked into
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, intptr_t count);
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x80;

extern "C" {
extern PyObject _Py_NoneStruct, PyLong_Type, PyFloat_Type;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyLong_FromLong(long);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromVoidPtr(void*);
void* PyLong_AsVoidPtr(PyObject*);
long long PyLong_AsLongLong(PyObject*);
double PyFloat_AsDouble(PyObject*);
intptr_t PyDict_Size(PyObject*);
PyObject* PyDict_GetItem(PyObject*, PyObject* key);  // borrowed
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);  // borrowed
int PyObject_IsInstance(PyObject*, PyObject* type);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
void Py_IncRef(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_Clear();
void* PyEval_SaveThread();  // releases Python's lock
void PyEval_RestoreThread(void*);
}

inline bool is_none(const PyObject* object) { return object == &_Py_NoneStruct; }

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

  void* address() const { return static_cast<char*>(data) + byte_offset; }
};

struct ExchangeApi {
  uint32_t major, minor;
  void *previous, *allocate, *from_object, *to_object;
  int (*read)(void* object, DLTensor*);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

static const ExchangeApi* exchange_api;

// Returns whether this version is known.
extern "C" inline __attribute__((used)) int use_exchange_api(const ExchangeApi* api) {
  exchange_api = api;
  return api->major == 1 && api->read && api->current_stream;
}

// The object has to be a torch.Tensor: that is not checked. False if it has no memory of its own to describe.
inline bool read(PyObject* object, DLTensor& tensor) {
  if (exchange_api->read(object, &tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

// ---- What a launcher takes

struct CUstream_st;

struct View {  // as in tensor.cuh
  void* data;
  int64_t sizes[4], strides[4];
};

// Of at most four dimensions, which the caller checks.
inline View view_of(const DLTensor& tensor) {
  View view = {tensor.address(), {1, 1, 1, 1}, {0, 0, 0, 0}};
  for (int i = 0; i < tensor.ndim; ++i) {
    view.sizes[i] = tensor.sizes[i];
    view.strides[i] = tensor.sizes[i] != 1 ? tensor.strides[i] : 0;
  }
  return view;
}
