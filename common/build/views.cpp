// Fills in the Views of a launcher's arguments from torch's tensors. In Python code that takes half a microsecond each.
#include "dlpack.h"

// What a launcher's tensors go to: call.py has the same structures.
struct Slot {
  View view;
  int64_t takes_none;  // a pointer: any number of dimensions, or None
};

struct Slots {
  int64_t device_type, device_id;
  Slot slots[];
};

static bool fill(Slot& slot, PyObject* object, const Slots& all) {
  if (slot.takes_none && is_none(object)) {
    slot.view.data = nullptr;
    return true;
  }
  DLTensor tensor;
  if (is_none(object) || !read(object, tensor)) return false;
  if (tensor.device.type != all.device_type || tensor.device.id != all.device_id) return false;
  int64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= tensor.sizes[i];
  if (!tensor.data && elements) return false;  // a FakeTensor of torch.compile
  if (slot.takes_none) {
    slot.view.data = tensor.address();
    return true;
  }
  if (tensor.ndim > 4) return false;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.sizes[i] > INT32_MAX) return false;
  slot.view = view_of(tensor);
  return true;
}

// fill(address of Slots, tensor, ...): 0, or 1 if a tensor does not fit.
static PyObject* fill_all(PyObject*, PyObject* const* arguments, intptr_t count) {
  Slots* slots = static_cast<Slots*>(PyLong_AsVoidPtr(arguments[0]));
  for (intptr_t i = 1; i < count; ++i)
    if (!fill(slots->slots[i - 1], arguments[i], *slots)) return PyLong_FromLong(1);
  return PyLong_FromLong(0);
}

extern "C" PyObject* function() {
  static PyMethodDef definition = {"fill", fill_all, METH_FASTCALL, "See views.cpp."};
  return PyCFunction_NewEx(&definition, nullptr, nullptr);
}
