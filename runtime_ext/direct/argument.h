// One argument of an operator of PyTorch, with the tensors that are still to be filled in.
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
    kTensor,    // a tensor of the call, its dimensions in another order or as they are
    kSize,      // a size of a tensor of the call, or its negative
    kText,      // a string
    kList,      // the items
    kOptional,  // the one item, where there may be none
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

// What a Python object stands for, see DirectCall in _native.pyi. Empty with an exception set if it is no
// argument, or of tensors that the call does not have; without one if this torch cannot take it.
std::optional<Argument> ParseArgument(PyObject* object, size_t tensors);

// A tensor over borrowed memory. `order`: of its dimensions; empty as they are. Null if torch refuses.
TensorHandle Borrow(const TorchAbi& torch, const DLTensor& tensor, const std::vector<int64_t>& order);

// The argument as torch takes it, which owns it afterwards. False if torch refuses; what was made until then
// is lost, as only want of memory ends here.
bool MakeArgument(const TorchAbi& torch, const Argument& argument, const DLTensor* tensors,
                  StableValue* value);

}  // namespace torch2ort
