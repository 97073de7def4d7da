// A fused region: several operators in one function of a library that was compiled for it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "python.h"

namespace torch2ort {

// torch2ort/kernels/regions/source.py writes the function. It takes the addresses of the inputs, the outputs
// and the temporaries, and gives 0 if it succeeded. It needs neither Python nor torch.
struct CompiledRegion {
  using Function = int32_t (*)(char* const* memory);
  using Sizes = std::vector<int64_t>;

  Function function = nullptr;
  std::vector<Sizes> inputs, outputs;  // all contiguous
  std::vector<size_t> temporaries;     // bytes
};

// Of Python's: an address, lists of tuples of sizes, and a list of bytes. Empty with an exception set if it
// is something else.
std::optional<CompiledRegion> ParseCompiledRegion(PyObject* address, PyObject* inputs, PyObject* outputs,
                                                  PyObject* temporaries);

}  // namespace torch2ort
