// CPython, an owning reference, and the few calls whose spelling differs between Python 3.10 and 3.13.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <memory>
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

// An array whose size is known at run time and small nearly always: no allocation up to N elements.
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

// Takes the pending exception off the interpreter, its traceback attached.
inline PyObject* TakeRaised() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (type == nullptr) return nullptr;
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

// The object behind a weak reference; empty when it is gone.
inline Ref Dereference(PyObject* weak) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(weak, &object) < 0) PyErr_Clear();
  return Ref::Steal(object);
#else
  PyObject* object = PyWeakref_GetObject(weak);
  return object == Py_None ? Ref() : Ref::Share(object);
#endif
}

}  // namespace torch2ort
