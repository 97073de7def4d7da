#include "direct/argument.h"

#include <cstring>

#include "call/site.h"

namespace torch2ort {

namespace {

std::string Text(PyObject* object) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(object, &size);
  return utf8 == nullptr ? std::string() : std::string(utf8, static_cast<size_t>(size));
}

// A number that torch returns from the function of that name.
std::optional<Argument> Told(const std::string& function) {
  auto* tell = reinterpret_cast<int32_t (*)()>(FindTorchFunction(function));
  if (tell == nullptr) return std::nullopt;
  return Argument::Word(static_cast<StableValue>(tell()));
}

std::optional<Argument> Refuse(PyObject* object) {
  if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "not an argument of a call: %R", object);
  return std::nullopt;
}

bool ParseItems(PyObject* list, size_t tensors, std::vector<Argument>* items) {
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    std::optional<Argument> item = ParseArgument(PyList_GetItem(list, i), tensors);
    if (!item) return false;
    items->push_back(std::move(*item));
  }
  return true;
}

bool ParseOrder(PyObject* tuple, std::vector<int64_t>* order) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) {
    long long dimension = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (dimension < 0 || dimension >= PyTuple_Size(tuple)) return false;
    order->push_back(dimension);
  }
  return order->size() <= kMaxRank;
}

// ("tensor", i), ("permuted", i, order), ("size", i, dimension, sign)
std::optional<Argument> ParseOfTensor(PyObject* tuple, const std::string& kind, size_t tensors) {
  Argument argument;
  Py_ssize_t index = 0, dimension = 0, sign = 1;
  const char* tag = nullptr;
  PyObject* order = nullptr;
  bool good = false;
  if (kind == "size") {
    argument.kind = Argument::Kind::kSize;
    good = PyArg_ParseTuple(tuple, "snnn", &tag, &index, &dimension, &sign) != 0 && dimension >= 0;
  } else {
    argument.kind = Argument::Kind::kTensor;
    good = PyArg_ParseTuple(tuple, "sn|O!", &tag, &index, &PyTuple_Type, &order) != 0 &&
           (order == nullptr || ParseOrder(order, &argument.order));
  }
  if (!good || index < 0 || static_cast<size_t>(index) >= tensors) return Refuse(tuple);
  argument.tensor = static_cast<size_t>(index);
  argument.dimension = static_cast<size_t>(dimension);
  argument.sign = sign;
  return argument;
}

std::optional<Argument> ParseTagged(PyObject* tuple, size_t tensors) {
  if (PyTuple_Size(tuple) < 2 || !PyUnicode_Check(PyTuple_GetItem(tuple, 0))) return Refuse(tuple);
  std::string kind = Text(PyTuple_GetItem(tuple, 0));
  if (kind == "tensor" || kind == "permuted" || kind == "size") return ParseOfTensor(tuple, kind, tensors);
  PyObject* content = PyTuple_GetItem(tuple, 1);
  if (kind == "optional") {
    std::optional<Argument> item = ParseArgument(content, tensors);
    if (!item) return std::nullopt;
    Argument argument;
    argument.kind = Argument::Kind::kOptional;
    argument.items.push_back(std::move(*item));
    return argument;
  }
  if (!PyUnicode_Check(content)) return Refuse(tuple);
  if (kind == "dtype" || kind == "layout" || kind == "memory_format") {
    return Told("aoti_torch_" + kind + "_" + Text(content));
  }
  // A device has a kind and an index, which is -1 for the current one.
  if (kind == "device" && Text(content) == "cpu") return Argument::Word(StableValue{0xffffffff});
  return Refuse(tuple);
}

size_t Position(const std::vector<int64_t>& order, size_t i) {
  return order.empty() ? i : static_cast<size_t>(order[i]);
}

}  // namespace

Argument Argument::Word(StableValue word) {
  Argument argument;
  argument.word = word;
  return argument;
}

Argument Argument::Number(double number) {
  StableValue word = 0;
  std::memcpy(&word, &number, sizeof(number));
  return Word(word);
}

std::optional<Argument> ParseArgument(PyObject* object, size_t tensors) {
  if (object == Py_None) return Argument();
  if (PyBool_Check(object)) return Argument::Word(object == Py_True ? 1 : 0);
  if (PyFloat_Check(object)) return Argument::Number(PyFloat_AsDouble(object));
  if (PyLong_Check(object)) {
    long long number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred() != nullptr) return std::nullopt;
    return Argument::Word(static_cast<StableValue>(number));
  }
  if (PyTuple_Check(object)) return ParseTagged(object, tensors);
  Argument argument;
  if (PyUnicode_Check(object)) {
    argument.kind = Argument::Kind::kText;
    argument.text = Text(object);
  } else if (PyList_Check(object)) {
    argument.kind = Argument::Kind::kList;
    if (!ParseItems(object, tensors, &argument.items)) return std::nullopt;
  } else {
    return Refuse(object);
  }
  return argument;
}

TensorHandle Borrow(const TorchAbi& torch, const DLTensor& tensor, const std::vector<int64_t>& order) {
  auto rank = static_cast<size_t>(tensor.ndim);
  if (!order.empty() && order.size() != rank) return nullptr;
  SmallArray<int64_t, 16> dense(rank), sizes(rank), strides(rank);
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    dense[i] = tensor.strides != nullptr ? tensor.strides[i] : stride;
    stride *= std::max<int64_t>(tensor.shape[i], 1);
  }
  for (size_t i = 0; i < rank; ++i) {
    sizes[i] = tensor.shape[Position(order, i)];
    strides[i] = dense[Position(order, i)];
  }
  TensorHandle handle = nullptr;
  TorchError error =
      torch.create_tensor_from_blob(static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.ndim,
                                    sizes.data(), strides.data(), 0, TorchDType(torch, tensor.dtype),
                                    /*device_type=*/0, /*device_index=*/0, &handle);
  return error == 0 ? handle : nullptr;
}

namespace {

template <typename Pointer>
StableValue Handle(Pointer* pointer) {
  return reinterpret_cast<StableValue>(pointer);
}

bool MakeList(const TorchAbi& torch, const Argument& argument, const DLTensor* tensors, StableValue* value) {
  StableList* list = nullptr;
  if (torch.new_list(argument.items.size(), &list) != 0) return false;
  for (const Argument& item : argument.items) {
    StableValue made = 0;
    if (!MakeArgument(torch, item, tensors, &made) || torch.list_push_back(list, made) != 0) return false;
  }
  *value = Handle(list);
  return true;
}

bool MakeOptional(const TorchAbi& torch, const Argument& argument, const DLTensor* tensors,
                  StableValue* value) {
  StableValue item = 0;
  if (!MakeArgument(torch, argument.items.front(), tensors, &item)) return false;
  StableValue* box = nullptr;
  if (torch.new_stable_value == nullptr) {
    box = new StableValue;
  } else if (torch.new_stable_value(&box) != 0) {
    return false;
  }
  *box = item;
  *value = Handle(box);
  return true;
}

}  // namespace

bool MakeArgument(const TorchAbi& torch, const Argument& argument, const DLTensor* tensors,
                  StableValue* value) {
  switch (argument.kind) {
    case Argument::Kind::kWord:
      *value = argument.word;
      return true;
    case Argument::Kind::kTensor: {
      TensorHandle handle = Borrow(torch, tensors[argument.tensor], argument.order);
      *value = Handle(handle);
      return handle != nullptr;
    }
    case Argument::Kind::kSize: {
      const DLTensor& tensor = tensors[argument.tensor];
      if (argument.dimension >= static_cast<size_t>(tensor.ndim)) return false;
      *value = static_cast<StableValue>(argument.sign * tensor.shape[argument.dimension]);
      return true;
    }
    case Argument::Kind::kText: {
      StableString* text = nullptr;
      if (torch.new_string(argument.text.data(), argument.text.size(), &text) != 0) return false;
      *value = Handle(text);
      return true;
    }
    case Argument::Kind::kList:
      return MakeList(torch, argument, tensors, value);
    case Argument::Kind::kOptional:
      return MakeOptional(torch, argument, tensors, value);
  }
  return false;
}

}  // namespace torch2ort
