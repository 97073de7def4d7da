"""Kernels and their calls are extracted from the module that Inductor writes; nothing else of it runs."""

from __future__ import annotations

import pytest
import torch

from torch2ort.fusion.cpp_source import CppProgram, program_of, text_of
from torch2ort.fusion.inductor_kernels import UnknownCodeError, record_calls
from torch2ort.sizes.expressions import evaluate, parse

INPUTS = [(torch.float32, (2, 3)), (torch.bfloat16, (3,))]
KERNEL = '#include <cstdint>\nextern "C"  void  kernel(const float* a, float* b)\n{\n  b[0] = a[0];\n}'


def module(body: str, *, types: str = "['const float*', 'float*']", kernel: str = KERNEL) -> str:
    """A module as Inductor writes it, with ``body`` as its calls."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"""
raise RuntimeError("nobody runs this")
from nowhere import anything
empty_strided_cpu = anything.else_
async_compile = AsyncCompile()
first = async_compile.cpp_pybinding({types}, r'''
{kernel}
''')
async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        *sizes, x, y = args
        args.clear()
{lines}

runner = Runner(partitions=[])
call = runner.call
"""


def test_kernels_are_called_with_the_memory_of_inputs_outputs_and_what_lies_between():
    body = """\
assert_size_stride(x, (2, 3), (3, 1), 'input')
between = empty_strided_cpu((2, 3), (3, 1), torch.float32)
first(x, between)
del x
other = between; del between  # reuse
result = empty_strided_cpu((6, 1), (1, 6), torch.float32)
first(reinterpret_tensor(other, (3,), (1,), 3), result)
return (reinterpret_tensor(result, (6,), (1,), 0),)"""
    found = record_calls(module(body), INPUTS)
    program, part = program_of("entry", found)
    assert program == CppProgram("entry", ((torch.float32, (6,)),), (24,))
    text = text_of([part], [kernel for kernel, _ in found.calls])
    assert text.count("#include <cstdint>") == 2  # of the kernel's, once, and of the library
    calls = [line.replace("reinterpret_cast", "").strip() for line in text.splitlines() if "::kernel" in line]
    assert calls == [
        "entry_0::kernel(<const float*>(memory[0] + 0), <float*>(memory[3] + 0));",
        "entry_0::kernel(<const float*>(memory[3] + 12), <float*>(memory[2] + 0));",
    ]


def test_outputs_that_share_memory_are_copied_apart():
    body = """\
result = empty_strided_cpu((2, 3), (3, 1), torch.float32)
first(x, result)
return (result, result, x, reinterpret_tensor(result, (3,), (1,), 3))"""
    program, part = program_of("entry", record_calls(module(body), INPUTS))
    assert [sizes for _, sizes in program.outputs] == [(2, 3), (2, 3), (2, 3), (3,)]
    assert program.temporaries == ()
    assert [line.strip() for line in part.splitlines() if "memcpy" in line] == [
        "std::memcpy(memory[3], memory[2] + 0, 24);",
        "std::memcpy(memory[4], memory[0] + 0, 24);",
        "std::memcpy(memory[5], memory[2] + 12, 12);",
    ]


N, M = parse("n0"), parse("n1")
VARYING = [(torch.float32, (N, M, 4)), (torch.bfloat16, (3,))]
SIZED = '#include <cstdint>\nextern "C"  void  kernel(const float* a, float* b, const int64_t ks0)\n{}'


def test_sizes_that_vary_are_arithmetic_in_cpp():
    body = """\
s0, s1 = sizes
assert_size_stride(x, (s0, s1, 4), (4*s1, 4, 1), 'input')
between = empty_strided_cpu((s0, s1), (s1, 1), torch.float32)
first(x, between, s0*s1)
result = empty_strided_cpu((s1 + 1, s0), (s0, 1), torch.float32)
first(reinterpret_tensor(between, (s1,), (1,), s1*(s0 - 1)), result, (4*s0) // 3)
return (reinterpret_tensor(result, (s0*(s1 + 1),), (1,), 0),)"""
    types = "['const float*', 'float*', 'const int64_t']"
    found = record_calls(module(body, types=types, kernel=SIZED), VARYING, ["n0", "n1"])
    program, part = program_of("entry", found, ["n0", "n1"])
    ((dtype, (size,)),), (bytes_between,) = program.outputs, program.temporaries
    assert dtype is torch.float32
    for n, m in ((2, 3), (7, 5)):
        assert evaluate(size, {"n0": n, "n1": m}) == n * (m + 1)
        assert evaluate(bytes_between, {"n0": n, "n1": m}) == 4 * n * m
    calls = [line.replace("reinterpret_cast", "").strip() for line in part.splitlines() if "::kernel" in line]
    assert [call.rpartition(", ")[2] for call in calls] == [
        "(sizes[0] * sizes[1]));",
        "((4 * sizes[0]) / 3));",
    ]
    told = [line.strip() for line in part.splitlines() if "numbers[" in line]
    assert told[:5] == [
        "numbers[0] = sizes[0];",
        "numbers[1] = sizes[1];",
        "numbers[2] = 4;",
        "numbers[3] = 3;",
        "numbers[4] = (sizes[0] * (1 + sizes[1]));",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("n, m = sizes\nreturn (reinterpret_tensor(x, (4*n*m + 1,), (1,), 0),)", "larger than its memory"),
        ("n, _ = sizes\nreturn (reinterpret_tensor(x, (n,), (1,), n - 3),)", "larger than its memory"),
        ("_, n = sizes\nassert_size_stride(x, (n, n, 4), (4*n, 4, 1))\nreturn ()", "another memory layout"),
        ("n, _ = sizes\nassert_size_stride(x, (n, n, 4), (4*n, 4, 1))\nreturn ()", "another memory layout"),
        ("return (3 if sizes[0] > 5 else x,)", "truth value of Relational"),
    ],
)  # fmt: skip
def test_what_does_not_hold_for_all_sizes_is_refused(body, said):
    with pytest.raises(UnknownCodeError, match=said):
        record_calls(module(body), VARYING, ["n0", "n1"])


MADE = "result = empty_strided_cpu((2, 3), (3, 1), torch.float32)\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return extern_kernels.mm(x, x)", "NameError: name 'extern_kernels' is not defined"),
        ("return (torch.ops.aten.tanh(x),)", "tanh"),
        ("return (x.tanh(),)", "'BufferView' object has no attribute 'tanh'"),
        (MADE + "first(x)\nreturn (result,)", "a kernel is called with a wrong number of arguments"),
        (MADE + "first(result, x)\nreturn (result,)", "a kernel is called with BufferView"),
        (MADE + "first(x, 3)\nreturn (result,)", "a kernel is called with 3 for float"),
        (MADE + "return (reinterpret_tensor(result, (3,), (1,), 4),)", "a view is larger than its memory"),
        (MADE + "return (reinterpret_tensor(result, (3,), (1,), -1),)", "a view is larger than its memory"),
        (MADE + "return (reinterpret_tensor(result, (3, 2), (1, 3), 0),)", "is not a contiguous tensor"),
        ("return (3,)", "an output is not a contiguous tensor"),
        ("assert_size_stride(x, (2, 3), (1, 2))\nreturn ()", "another memory layout"),
        ("assert_size_stride(x, (3, 2), (2, 1))\nreturn ()", "another memory layout"),
    ],
)  # fmt: skip
def test_a_module_that_does_anything_else_is_refused(body, said):
    with pytest.raises(UnknownCodeError, match=said):
        record_calls(module(body), INPUTS)


@pytest.mark.parametrize("types", ["['const float*', 'int64_t']", "['float*', 'float*']"])
def test_kernels_that_take_something_else_are_refused(types):
    body = MADE + "first(x, result)\nreturn (result,)"
    with pytest.raises(UnknownCodeError, match="a kernel is called with BufferView"):
        record_calls(module(body, types=types), INPUTS)


def test_a_kernel_of_another_form_is_refused():
    body = MADE + "first(x, result)\nreturn (result,)"
    found = record_calls(module(body, kernel="void other() {}"), INPUTS)
    with pytest.raises(UnknownCodeError, match="a kernel has no function of the known name"):
        program_of("entry", found)
