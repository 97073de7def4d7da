"""Prints what the library says of a PythonOp node on a CUDA device, to a runtime that is made up here.

It takes the place of an onnxruntime with the CUDAExecutionProvider, which makes no kernel without a GPU. A
process of its own, as the library remembers the runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch2ort

TEXTS = {b"func_name": b"lib.Gelu", b"node": b"PythonOp_0"}
# Of OrtCustomOp, in pointers.
PROVIDER, CREATE_KERNEL = 3, 17

table = (c_void_p * 415)()
kept: list[Any] = []
operators: list[int] = []
messages: list[bytes] = []


def slot(number: int, *arguments: Any) -> Callable[[Any], Any]:
    """Put the function that follows into the runtime's table."""

    def put(function: Any) -> Any:
        kept.append(CFUNCTYPE(c_void_p, *arguments)(function))
        table[number] = ctypes.cast(kept[-1], c_void_p).value
        return function

    return put


@slot(0, c_int, c_char_p)
def create_status(code, message):
    messages.append(message)
    return len(messages)


@slot(26, c_char_p, POINTER(c_void_p))
def create_custom_op_domain(name, out):
    out[0] = 1


@slot(27, c_void_p, c_void_p)
def custom_op_domain_add(domain, operator):
    operators.append(operator)


@slot(28, c_void_p, c_void_p)
@slot(130, c_void_p, c_char_p, c_char_p)
@slot(237, c_void_p, c_char_p, POINTER(c_int))
def succeed(*arguments):
    return None


@slot(87, c_void_p, c_char_p, c_void_p, POINTER(c_size_t))
def read_attribute(info, name, out, size):
    text = TEXTS[name] + b"\0"
    size[0] = len(text)
    if out:
        ctypes.memmove(out, text, len(text))


@slot(244, c_void_p, c_void_p, POINTER(c_size_t))
def read_node_name(info, out, size):
    read_attribute(info, b"node", out, size)


def main() -> None:
    """Register the library and make one kernel for CUDA."""
    get_api = CFUNCTYPE(c_void_p, ctypes.c_uint32)(lambda version: ctypes.addressof(table))
    get_version = CFUNCTYPE(c_void_p)(lambda: ctypes.addressof(version))
    version = ctypes.create_string_buffer(b"1.31.1")
    base = (c_void_p * 2)(ctypes.cast(get_api, c_void_p), ctypes.cast(get_version, c_void_p))
    register = ctypes.CDLL(torch2ort.custom_ops_library_path()).RegisterCustomOps
    register.restype, register.argtypes = c_void_p, (c_void_p, c_void_p)
    assert register(None, base) is None
    for address in operators:
        fields = (c_void_p * (CREATE_KERNEL + 1)).from_address(address)
        if CFUNCTYPE(c_char_p, c_void_p)(fields[PROVIDER])(address) == b"CUDAExecutionProvider":
            create = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)(fields[CREATE_KERNEL])
            status = create(address, table, None, ctypes.byref(c_void_p()))
            print(messages[status - 1].decode() if status else "made")
            return


if __name__ == "__main__":
    main()
