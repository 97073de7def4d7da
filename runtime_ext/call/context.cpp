#include "call/context.h"

#include <new>

#include "call/function_call.h"

namespace torch2ort {

PyTypeObject* context_type = nullptr;

void MetaList::Append(const DLTensor& tensor) {
  Span span = SpanOf(tensor);
  words_.insert(words_.end(), {tensor.ndim, tensor.device.device_type, tensor.device.device_id,
                               static_cast<int64_t>(span.begin), static_cast<int64_t>(span.end)});
  words_.insert(words_.end(), tensor.shape, tensor.shape + tensor.ndim);
}

size_t MetaList::WordOf(size_t index) const {
  size_t word = 0;
  for (size_t i = 0; i < index; ++i) word += kHeader + static_cast<size_t>(words_[word]);
  return word;
}

TensorMeta MetaList::Get(size_t index) const {
  const int64_t* word = words_.data() + WordOf(index);
  return {word + kHeader,
          static_cast<int32_t>(word[0]),
          {static_cast<int32_t>(word[1]), static_cast<int32_t>(word[2])}};
}

bool MetaList::Overlaps(const Span& span, size_t count) const {
  const int64_t* word = words_.data();
  for (size_t i = 0; i < count; ++i) {
    if (span.Overlaps({static_cast<uintptr_t>(word[3]), static_cast<uintptr_t>(word[4])})) return true;
    word += kHeader + static_cast<size_t>(word[0]);
  }
  return false;
}

void MetaList::ForgetSpan(size_t index) {
  size_t word = WordOf(index);
  words_[word + 3] = words_[word + 4] = 0;
}

namespace {

Context* AsContext(PyObject* self) { return reinterpret_cast<Context*>(self); }

void Assign(PyObject** slot, PyObject* value) {
  Ref old = Ref::Steal(std::exchange(*slot, Ref::Share(value).release()));
}

Ref Allocate(PyTypeObject* type, PyObject* needs_input_grad) {
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self) return {};
  Context* context = AsContext(self.get());
  new (&context->saved_versions) std::vector<long>;
  new (&context->tensors) MetaList;
  context->materialize_grads = true;
  Py_INCREF(needs_input_grad);
  context->needs_input_grad = needs_input_grad;
  return self;
}

PyObject* ContextNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"needs_input_grad", nullptr};
  PyObject* needs_input_grad = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Context", const_cast<char**>(names), &PyTuple_Type,
                                   &needs_input_grad)) {
    return nullptr;
  }
  return Allocate(type, needs_input_grad).release();
}

int ContextTraverse(PyObject* self, visitproc visit, void* arg) {
  Context* context = AsContext(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(context->attributes);
  Py_VISIT(context->needs_input_grad);
  Py_VISIT(context->to_save);
  Py_VISIT(context->saved);
  Py_VISIT(context->saved_for_forward);
  Py_VISIT(context->dirty_tensors);
  Py_VISIT(context->non_differentiable);
  return 0;
}

int ContextClear(PyObject* self) {
  Context* context = AsContext(self);
  Py_CLEAR(context->attributes);
  Py_CLEAR(context->needs_input_grad);
  Py_CLEAR(context->to_save);
  Py_CLEAR(context->saved);
  Py_CLEAR(context->saved_for_forward);
  Py_CLEAR(context->dirty_tensors);
  Py_CLEAR(context->non_differentiable);
  return 0;
}

void ContextDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Context* context = AsContext(self);
  if (context->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  ContextClear(self);
  context->saved_versions.~vector();
  context->tensors.~MetaList();
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// torch's wording (THPFunction); up to 2.14 its message may end before the type's name.
bool CheckSaved(PyObject* saved) {
  if (!PyTuple_Check(saved)) {
    PyErr_Format(PyExc_RuntimeError,
                 "autograd internal error: to_save attribute is expected to be a tuple but is %s",
                 TypeName(saved).c_str());
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(saved); ++i) {
    PyObject* tensor = PyTuple_GetItem(saved, i);
    if (tensor == Py_None || IsTensor(tensor)) continue;
    PyErr_Format(PyExc_TypeError, "save_for_backward can only save variables, but argument %zd is of type %s",
                 i, TypeName(tensor).c_str());
    return false;
  }
  return true;
}

PyObject* SaveForBackward(PyObject* self, PyObject* tensors) {
  Context* context = AsContext(self);
  if (!context->in_forward && (!CheckConfigured() || !CheckSaved(tensors))) return nullptr;
  Assign(&context->to_save, tensors);
  Py_RETURN_NONE;
}

PyObject* SaveForForward(PyObject* self, PyObject* tensors) {
  if (!CheckConfigured()) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
    PyObject* tensor = PyTuple_GetItem(tensors, i);
    if (tensor == Py_None || IsTensor(tensor)) continue;
    PyErr_SetString(
        PyExc_AssertionError,
        "save_for_forward expects all arguments to be tensors; you should save non-tensors as attributes "
        "on ctx.");
    return nullptr;
  }
  Assign(&AsContext(self)->saved_for_forward, tensors);
  Py_RETURN_NONE;
}

PyObject* MarkDirty(PyObject* self, PyObject* tensors) {
  Assign(&AsContext(self)->dirty_tensors, tensors);
  Py_RETURN_NONE;
}

PyObject* MarkNonDifferentiable(PyObject* self, PyObject* tensors) {
  Assign(&AsContext(self)->non_differentiable, tensors);
  Py_RETURN_NONE;
}

PyObject* MarkSharedStorage(PyObject*, PyObject*) {
  if (PyErr_WarnEx(
          PyExc_FutureWarning,
          "`mark_shared_storage` is deprecated. Tensors with shared storages are automatically tracked. Note "
          "that calls to `set_()` are not tracked",
          1) < 0) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

int AssignMaterializeGrads(PyObject* self, PyObject* value, void*) {
  if (value == nullptr || !PyBool_Check(value)) {
    PyErr_SetString(
        PyExc_TypeError,
        "set_materialize_grads received an invalid combination of arguments - got (), but expected (bool)");
    return -1;
  }
  AsContext(self)->materialize_grads = value == Py_True;
  return 0;
}

PyObject* SetMaterializeGrads(PyObject* self, PyObject* value) {
  if (AssignMaterializeGrads(self, value, nullptr) < 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* GetMaterializeGrads(PyObject* self, void*) {
  return PyBool_FromLong(AsContext(self)->materialize_grads);
}

PyObject* Release(PyObject* self, PyObject*) {
  ReleaseContext(AsContext(self));
  Py_RETURN_NONE;
}

bool CheckVersions(Context* context) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(context->saved); ++i) {
    PyObject* tensor = PyTuple_GetItem(context->saved, i);
    if (tensor == Py_None) continue;
    long expected = context->saved_versions[static_cast<size_t>(i)];
    long version = WritesTo(tensor);
    if (version < 0) return false;
    if (version == expected) continue;
    Ref kind = Ref::Steal(PyObject_CallMethod(tensor, "type", nullptr));
    Ref shape = kind ? Ref::Steal(PyObject_GetAttrString(tensor, "shape")) : Ref();
    Ref sizes = shape ? Ref::Steal(PySequence_List(shape.get())) : Ref();
    if (!sizes) return false;
    PyErr_Format(
        PyExc_RuntimeError,
        "one of the variables needed for gradient computation has been modified by an inplace operation: [%U "
        "%S] is at version %ld; expected version %ld instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True, "
        "check_nan=False).",
        kind.get(), sizes.get(), version, expected);
    return false;
  }
  return true;
}

PyObject* GetSavedTensors(PyObject* self, void*) {
  Context* context = AsContext(self);
  if (context->released) {
    PyErr_SetString(PyExc_RuntimeError,
                    "Trying to backward through the graph a second time (or directly access saved tensors "
                    "after they have already "
                    "been freed). Saved intermediate values of the graph are freed when you call .backward() "
                    "or autograd.grad(). "
                    "Specify retain_graph=True if you need to backward through the graph a second time or if "
                    "you need to access "
                    "saved tensors after calling backward.");
    return nullptr;
  }
  if (context->saved_for_forward != nullptr) return Ref::Share(context->saved_for_forward).release();
  // Inside of forward, torch has not yet taken over the arguments of save_for_backward.
  if (context->in_forward) return PyTuple_New(0);
  if (context->saved != nullptr)
    return CheckVersions(context) ? Ref::Share(context->saved).release() : nullptr;
  // This context was not made by a call of a site.
  if (context->to_save == nullptr) return PyTuple_New(0);
  return CheckConfigured() && CheckSaved(context->to_save) ? Ref::Share(context->to_save).release() : nullptr;
}

PyObject* GetSavedVariables(PyObject* self, void*) {
  const char* message = "'saved_variables' is deprecated; use 'saved_tensors'";
  return PyErr_WarnEx(PyExc_DeprecationWarning, message, 1) < 0 ? nullptr : GetSavedTensors(self, nullptr);
}

PyMethodDef methods[] = {
    {"save_for_backward", SaveForBackward, METH_VARARGS, nullptr},
    {"save_for_forward", SaveForForward, METH_VARARGS, nullptr},
    {"mark_dirty", MarkDirty, METH_VARARGS, nullptr},
    {"mark_non_differentiable", MarkNonDifferentiable, METH_VARARGS, nullptr},
    {"mark_shared_storage", MarkSharedStorage, METH_VARARGS, nullptr},
    {"set_materialize_grads", SetMaterializeGrads, METH_O, nullptr},
    {"release", Release, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Unset members are None, as torch's are.
PyMemberDef members[] = {
    {"needs_input_grad", T_OBJECT, offsetof(Context, needs_input_grad), 0, nullptr},
    {"to_save", T_OBJECT, offsetof(Context, to_save), 0, nullptr},
    {"saved_for_forward", T_OBJECT, offsetof(Context, saved_for_forward), 0, nullptr},
    {"dirty_tensors", T_OBJECT, offsetof(Context, dirty_tensors), 0, nullptr},
    {"non_differentiable", T_OBJECT, offsetof(Context, non_differentiable), 0, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Context, attributes), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Context, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"saved_tensors", GetSavedTensors, nullptr, nullptr, nullptr},
    {"saved_variables", GetSavedVariables, nullptr, nullptr, nullptr},
    {"materialize_grads", GetMaterializeGrads, AssignMaterializeGrads, nullptr, nullptr},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(ContextNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(ContextDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(ContextTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(ContextClear)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Context", sizeof(Context), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
                    slots};

}  // namespace

bool InitContext(PyObject* module) {
  context_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (context_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "Context", reinterpret_cast<PyObject*>(context_type)) == 0;
}

Ref NewContext(PyObject* needs_input_grad) {
  Ref context = Allocate(context_type, needs_input_grad);
  if (context) AsContext(context.get())->in_forward = true;
  return context;
}

bool FinishForward(Context* context, bool executable) {
  context->in_forward = false;
  Py_CLEAR(context->saved_for_forward);
  // As in torch: otherwise the context would keep the tensors that forward wrote to.
  Py_CLEAR(context->dirty_tensors);
  Py_CLEAR(context->non_differentiable);
  // From here on `to_save` is an ordinary attribute, unrelated to the saved tensors.
  Ref saved = Ref::Steal(std::exchange(context->to_save, nullptr));
  if (executable && saved) {
    if (!CheckSaved(saved.get())) return false;
    Py_ssize_t count = PyTuple_Size(saved.get());
    context->saved_versions.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* tensor = PyTuple_GetItem(saved.get(), i);
      long version = tensor == Py_None ? 0 : WritesTo(tensor);
      if (version < 0) return false;
      context->saved_versions.push_back(version);
    }
    context->saved = saved.release();
  }
  return true;
}

void ReleaseContext(Context* context) {
  context->released = true;
  Py_CLEAR(context->to_save);
  Py_CLEAR(context->saved);
  Py_CLEAR(context->saved_for_forward);
}

}  // namespace torch2ort
