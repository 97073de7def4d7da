// A fused region: several operators in one function of a library that was compiled for it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "python.h"

namespace torch2ort {

// torch2ort/fusion/cpp_source.py writes the functions, which need neither Python nor torch. The arguments of
// the first are the addresses of the inputs, the outputs and the temporaries, and the varying sizes; it
// returns 0 on success. The second computes from these sizes the dimensions of the inputs and of the outputs,
// all contiguous, and the bytes of the temporaries, one after the other.
struct CompiledRegion {
  using Function = int32_t (*)(char* const* memory, const int64_t* sizes);
  using Numbers = void (*)(const int64_t* sizes, int64_t* numbers);

  struct Shape {
    size_t begin, rank;  // the position of the dimensions among the numbers, and their count
  };

  Function function = nullptr;
  Numbers tell = nullptr;        // for a region whose sizes vary
  std::vector<size_t> varying;   // the position of each of those among the numbers
  std::vector<int64_t> numbers;  // the results of `tell`; all of them are known where no size varies
  std::vector<Shape> inputs, outputs;
  size_t input_dimensions = 0;  // of all inputs together
  size_t temporaries = 0;       // their number; their bytes are the last numbers
};

// A library with varying sizes is compiled for sizes of at least this: see torch2ort/fusion/region.py.
constexpr int64_t kSmallestSize = 2;

// Parses Python objects: an address, lists of tuples of sizes, a list of bytes, each -1 if it varies, another
// address, and for each varying size the input and the dimension. Empty with an exception set for other
// objects.
std::optional<CompiledRegion> ParseCompiledRegion(PyObject* address, PyObject* inputs, PyObject* outputs,
                                                  PyObject* temporaries, PyObject* tell, PyObject* varying);

}  // namespace torch2ort
