// One argument of an operator of PyTorch, with placeholders for the call's tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "direct/torch_abi.h"
#include "python.h"
#include "tensors/exchange.h"

namespace torch2ort {

struct Argument {
  enum class Kind : char {
    kWord,      // a number, or nothing
    kTensor,    // a tensor of the call, its dimensions unchanged or in another order
    kSize,      // a size of a tensor of the call, or its negative
    kText,      // a string
    kList,      // the items
    kOptional,  // the item, or none
  };
  Kind kind = Kind::kWord;
  StableValue word = 0;
  size_t tensor = 0;
  std::vector<int64_t> order;
  size_t dimension = 0;
  int64_t sign = 1;
  std::string text;
  std::vector<Argument> items;

  static Argument Word(StableValue word);
  static Argument Number(double number);
};

// Parses the argument that a Python object describes, see DirectCall in _native.pyi. Empty with an exception
// set if it is no argument, or of a tensor that the call does not have; without one if this torch does not
// support it.
std::optional<Argument> ParseArgument(PyObject* object, size_t tensors);

// A tensor over borrowed memory. `order`: of its dimensions; empty for the same order. Null if torch refuses.
TensorHandle Borrow(const TorchAbi& torch, const DLTensor& tensor, const std::vector<int64_t>& order);

// Converts the argument for torch, which owns it afterwards. False if torch refuses; objects made until then
// are leaked, as this only happens without memory.
bool MakeArgument(const TorchAbi& torch, const Argument& argument, const DLTensor* tensors,
                  StableValue* value);

}  // namespace torch2ort
