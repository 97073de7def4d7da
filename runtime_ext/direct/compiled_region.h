// A fused region: several operators in one function of a library that was compiled for it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "python.h"

namespace torch2ort {

// torch2ort/fusion/cpp_source.py writes the functions, which need neither Python nor torch. The first
// takes the addresses of the inputs, the outputs and the temporaries, and the sizes that vary; it gives 0 if
// it succeeded. The second tells what these sizes come to: the dimensions of the inputs and of the outputs,
// all contiguous, and the bytes of the temporaries, one after the other.
struct CompiledRegion {
  using Function = int32_t (*)(char* const* memory, const int64_t* sizes);
  using Numbers = void (*)(const int64_t* sizes, int64_t* numbers);

  struct Shape {
    size_t begin, rank;  // where the dimensions stand among the numbers, and how many there are
  };

  Function function = nullptr;
  Numbers tell = nullptr;        // of a region whose sizes vary
  std::vector<size_t> varying;   // where each of those stands among the numbers
  std::vector<int64_t> numbers;  // what `tell` tells; all of it is known where no size varies
  std::vector<Shape> inputs, outputs;
  size_t input_dimensions = 0;  // of all inputs together
  size_t temporaries = 0;       // whose bytes are the last numbers
};

// A library is for sizes of at least this where they vary: see torch2ort/fusion/region.py.
constexpr int64_t kSmallestSize = 2;

// Of Python's: an address, lists of tuples of sizes, a list of bytes, each -1 if it varies, another address,
// and of each size that varies the input and the dimension. Empty with an exception set if it is something
// else.
std::optional<CompiledRegion> ParseCompiledRegion(PyObject* address, PyObject* inputs, PyObject* outputs,
                                                  PyObject* temporaries, PyObject* tell, PyObject* varying);

}  // namespace torch2ort
