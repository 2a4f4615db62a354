// Calls one function of C on the arguments that Python has by name. Built for each type of function; call.py says how.
//
// A launch costs the host a few microseconds, and doing this in Python, with ctypes, would cost it as much again.
#include <cstddef>
#include <tuple>
#include <utility>

#include "dlpack.h"

struct Bound {
  void* function;
  DLDevice device;  // where all tensors must be
  PyObject *tensor_type, *names, *misfit;
};

// ---- One argument: false if it does not fit.

static bool is_a(PyObject* object, PyObject& type) { return PyObject_IsInstance(object, &type) == 1; }

static bool take(const Bound& bound, PyObject* object, View& view, bool address_only = false) {
  DLTensor tensor;
  if (!is_a(object, *bound.tensor_type) || !read(object, tensor)) return false;
  if (tensor.device.type != bound.device.type || tensor.device.id != bound.device.id) return false;
  int64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= tensor.sizes[i];
  if (!tensor.data && elements) return false;  // a FakeTensor of torch.compile
  view.data = tensor.address();
  if (address_only) return true;
  if (tensor.ndim > 4) return false;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.sizes[i] > INT32_MAX) return false;
  view = view_of(tensor);
  return true;
}

static bool take(const Bound& bound, PyObject* object, void*& pointer) {
  View view = {};
  if (!is_none(object) && !take(bound, object, view, true)) return false;
  pointer = view.data;
  return true;
}

static bool take(const Bound&, PyObject* object, int64_t& number) {
  if (!is_a(object, PyLong_Type)) return false;
  number = PyLong_AsLongLong(object);
  return number != -1 || !PyErr_Occurred();
}

static bool take(const Bound& bound, PyObject* object, int& number) {
  int64_t wide;
  if (!take(bound, object, wide) || wide < INT32_MIN || wide > INT32_MAX) return false;
  number = int(wide);
  return true;
}

static bool take(const Bound&, PyObject* object, float& number) {
  if (!is_a(object, PyFloat_Type) && !is_a(object, PyLong_Type)) return false;
  const double wide = PyFloat_AsDouble(object);
  number = float(wide);
  return wide != -1 || !PyErr_Occurred();
}

static bool take(const Bound&, PyObject* object, CUstream_st*& stream) {
  stream = static_cast<CUstream_st*>(PyLong_AsVoidPtr(object));
  return true;
}

// ---- The call

// What Python gave for the parameter: by name, or the stream.
static PyObject* given(const Bound& bound, PyObject* const* a, intptr_t i) {
  if (i == PyTuple_Size(bound.names)) return a[1];
  return PyDict_GetItem(a[0], PyTuple_GetItem(bound.names, i));
}

template <typename Result, typename... Parameters, size_t... i>
static PyObject* call(Result (*)(Parameters...), const Bound& bound, PyObject* const* a, std::index_sequence<i...>) {
  std::tuple<Parameters...> values;
  const auto fits = [&](size_t j, auto& value) {
    PyObject* object = given(bound, a, j);
    return object && take(bound, object, value);
  };
  if (PyDict_Size(a[0]) != PyTuple_Size(bound.names) || !(fits(i, std::get<i>(values)) && ...)) {
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(bound.misfit, a[0], nullptr);  // raises an error that names it
  }
  const auto function = reinterpret_cast<Result (*)(Parameters...)>(bound.function);
  void* const thread = PyEval_SaveThread();
  const Result result = function(std::get<i>(values)...);
  PyEval_RestoreThread(thread);
  return PyLong_FromLongLong(result);
}

template <typename Result, typename... Parameters>
static PyObject* call(Result (*type)(Parameters...), const Bound& bound, PyObject* const* a) {
  return call(type, bound, a, std::index_sequence_for<Parameters...>());
}

using Function = FUNCTION;  // such as int(View, float, CUstream_st*)

static PyObject* call(PyObject* self, PyObject* const* a, intptr_t) {
  return call(static_cast<Function*>(nullptr), *static_cast<Bound*>(PyLong_AsVoidPtr(self)), a);
}

// bind(address of a function, DLPack's device type, index, torch.Tensor, names of the parameters, misfit): a function
// (arguments, stream) of Python. It is kept for as long as the process runs.
static PyObject* bind(PyObject*, PyObject* const* a, intptr_t) {
  const DLDevice device = {int(PyLong_AsLongLong(a[1])), int(PyLong_AsLongLong(a[2]))};
  for (int i = 3; i < 6; ++i) Py_IncRef(a[i]);
  static PyMethodDef definition = {"call", call, METH_FASTCALL, "See call.cpp."};
  Bound* bound = new Bound{PyLong_AsVoidPtr(a[0]), device, a[3], a[4], a[5]};
  return PyCFunction_NewEx(&definition, PyLong_FromVoidPtr(bound), nullptr);
}

extern "C" PyObject* function() {
  static PyMethodDef definition = {"bind", bind, METH_FASTCALL, "See call.cpp."};
  return PyCFunction_NewEx(&definition, nullptr, nullptr);
}
