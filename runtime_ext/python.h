// CPython's stable ABI, an owning reference, and short names for a few calls.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

namespace torch2ort {

// One owned reference to a Python object, or none.
class Ref {
 public:
  Ref() = default;
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(old);  // last, as it may run arbitrary code
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  static Ref Steal(PyObject* object) { return Ref(object); }
  static Ref Share(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  void reset() { *this = Ref(); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

// Holds the GIL, which every use of Python needs. Create one only while the interpreter runs.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// An array whose size is known at run time and is usually small: no allocation up to N elements.
template <typename T, size_t N>
class SmallArray {
 public:
  explicit SmallArray(size_t size) : size_(size) {
    if (size > N) heap_ = std::make_unique<T[]>(size);
    data_ = heap_ ? heap_.get() : inline_;
  }
  SmallArray(const SmallArray&) = delete;
  SmallArray& operator=(const SmallArray&) = delete;

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  size_t size() const { return size_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }

 private:
  size_t size_;
  T inline_[N] = {};
  std::unique_ptr<T[]> heap_;
  T* data_;
};

// ---- short names that the stable ABI of Python 3.10 lacks ----

// A tuple of `count` borrowed objects; empty with an exception set on failure.
inline Ref PackTuple(PyObject* const* items, size_t count) {
  Ref tuple = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; tuple && i < count; ++i) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), Ref::Share(items[i]).release());
  }
  return tuple;
}

// callable(*args)
inline Ref CallWith(PyObject* callable, PyObject* const* args, size_t count) {
  Ref tuple = PackTuple(args, count);
  return tuple ? Ref::Steal(PyObject_Call(callable, tuple.get(), nullptr)) : Ref();
}

inline PyObject* CallOne(PyObject* callable, PyObject* argument) {
  return PyObject_CallFunctionObjArgs(callable, argument, nullptr);
}

// The name of an object's type as in CPython's own messages: with the module for types defined in C.
inline std::string TypeName(PyObject* object) {
  auto text = [type = reinterpret_cast<PyObject*>(Py_TYPE(object))](const char* attribute) {
    Ref value = Ref::Steal(PyObject_GetAttrString(type, attribute));
    const char* utf8 = value ? PyUnicode_AsUTF8AndSize(value.get(), nullptr) : nullptr;
    if (utf8 == nullptr) PyErr_Clear();
    return std::string(utf8 == nullptr ? "" : utf8);
  };
  bool in_c = (PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_HEAPTYPE) == 0;
  std::string module = in_c ? text("__module__") : "builtins";
  return module == "builtins" ? text("__name__") : module + "." + text("__name__");
}

#pragma GCC diagnostic push
// Newer versions of Python deprecate these in favour of functions that older ones lack.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

// Removes the pending exception from the interpreter, and returns it with its traceback.
inline PyObject* TakeRaised() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (type == nullptr) return nullptr;
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
}

// The object behind a weak reference; empty if it was destroyed.
inline Ref Dereference(PyObject* weak) {
  PyObject* object = PyWeakref_GetObject(weak);
  return object == Py_None ? Ref() : Ref::Share(object);
}

#pragma GCC diagnostic pop

}  // namespace torch2ort
