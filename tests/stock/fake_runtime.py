"""An onnxruntime made up of Python functions, with a CUDA device of ordinary memory.

It replaces an onnxruntime with the CUDAExecutionProvider, which makes no kernel without a GPU, and runs
single nodes in torch2ort's library. Use it in a process of its own, as the library remembers its runtime.

The device's memory is accessible only inside of :meth:`Device.work`, in which PyTorch's operators run that a
GPU would run; any other access ends the process. The slots are those of
runtime_ext/custom_op/ort_api.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
    py_object,
)
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch

import torch2ort
from torch2ort.pythonop import native as configured
from torch2ort.pythonop.native import native

STREAM = 0x5EED
DEVICE_TYPE = 2  # DLPack's number of CUDA
# Positions in OrtCustomOp, counted in pointers.
NAME, PROVIDER, CREATE_KERNEL, COMPUTE = 2, 3, 17, 18

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Value:
    """A tensor of the runtime."""

    address: int
    sizes: Any
    type: int

    @property
    def tensor(self) -> torch.Tensor:
        """A copy in the host's memory."""
        dtype = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.INT64: torch.int64}[self.type]
        data = ctypes.string_at(self.address, math.prod(self.sizes) * dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(*self.sizes)


class Device:
    """Memory that only PyTorch's operators may access, and a list of events."""

    def __init__(self, size: int = 1 << 20) -> None:
        self._pages = mmap.mmap(-1, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._size, self._used = size, 0
        self.events: list[str] = []
        self._protect(False)

    def _protect(self, accessible: bool) -> None:
        flags = mmap.PROT_READ | mmap.PROT_WRITE if accessible else 0
        assert _libc.mprotect(c_void_p(self._base), c_size_t(self._size), flags) == 0

    @contextlib.contextmanager
    def work(self, event: str) -> Iterator[None]:
        """Let the block use the memory."""
        self.events.append(event)
        self._protect(True)
        try:
            yield
        finally:
            self._protect(False)

    def allocate(self, sizes: Sequence[int], type_: int) -> Value:
        """Allocate memory for a tensor with at most eight bytes per element."""
        address = self._base + self._used
        self._used += (math.prod(sizes) * 8 + 63) // 64 * 64
        assert self._used <= self._size
        return Value(address, (c_int64 * len(sizes))(*sizes), type_)

    def put(self, tensor: torch.Tensor) -> Value:
        """Copy a float tensor of the host to the device."""
        value = self.allocate(tensor.shape, onnx.TensorProto.FLOAT)
        with self.work("put"):
            ctypes.memmove(value.address, tensor.data_ptr(), tensor.nbytes)
        return value

    def fill(self, value: Value, byte: int) -> None:
        """Overwrite a tensor."""
        with self.work("fill"):
            ctypes.memset(value.address, byte, value.tensor.nbytes)

    def get(self, value: Value) -> torch.Tensor:
        """Copy a tensor of the device to the host."""
        with self.work("get"):
            return value.tensor


class Stream:
    """A substitute for PyTorch's stream context, as the library uses it."""

    def __init__(self, device: Device, address: int, number: int) -> None:
        self._events, self._name = device.events, f"stream {address:#x} of device {number}"

    def __enter__(self) -> None:
        self._events.append(f"enter {self._name}")

    def __exit__(self, *_: object) -> None:
        self._events.append("exit")


@dataclass
class Node:
    """A PythonOp or PythonOpGrad node, as the runtime describes it to the library."""

    proto: onnx.NodeProto
    inputs: Sequence[int]
    outputs: Sequence[int]
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.proto.attribute}


class Runtime:
    """The runtime: one call at a time. Make one per process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.node: Node | None = None
        self._messages: list[str] = []
        self._values: list[Value] = []
        self._given: list[Value] = []
        self._made: dict[int, Value] = {}
        self._table = (c_void_p * 415)()
        self._kept: list[Any] = []
        self._operators: list[int] = []
        self._fill_registration()
        self._fill_node()
        self._fill_call()
        self._register()

    def make(self, node: Node, provider: str = "CUDAExecutionProvider") -> Callable[..., list[Value]]:
        """Return a kernel of the library for ``node``; a refusal raises RuntimeError with its message."""
        self.node = node
        named = node.proto.op_type.encode(), provider.encode()
        (fields,) = [
            f
            for f in map(self._fields, self._operators)
            if (self._text(f, NAME), self._text(f, PROVIDER)) == named
        ][:1]
        create = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)(fields[CREATE_KERNEL])
        kernel = c_void_p()
        self._check(create(ctypes.addressof(fields), self._table, None, ctypes.byref(kernel)))
        compute = CFUNCTYPE(c_void_p, c_void_p, c_void_p)(fields[COMPUTE])

        def call(*inputs: Value) -> list[Value]:
            self.node = node
            self._given, self._made, self._values = list(inputs), {}, []
            self._check(compute(kernel, None))
            return [self._made[i] for i in sorted(self._made)]

        return call

    def _check(self, status: int | None) -> None:
        if status:
            raise RuntimeError(self._messages[status - 1])

    @staticmethod
    def _fields(operator: int) -> Any:
        return (c_void_p * (COMPUTE + 1)).from_address(operator)

    @staticmethod
    def _text(fields: Any, slot: int) -> bytes:
        text: bytes = CFUNCTYPE(c_char_p, c_void_p)(fields[slot])(ctypes.addressof(fields))
        return text

    def _slot(self, number: int, *arguments: Any) -> Callable[[Any], Any]:
        """Put the function that follows into the table."""

        def put(function: Any) -> Any:
            self._kept.append(CFUNCTYPE(c_void_p, *arguments)(function))
            self._table[number] = ctypes.cast(self._kept[-1], c_void_p).value
            return function

        return put

    def _handle(self, value: Value) -> int:
        self._values.append(value)
        return len(self._values)

    def _fill_registration(self) -> None:
        @self._slot(0, c_int, c_char_p)
        def create_status(code, message):
            self._messages.append(message.decode())
            return len(self._messages)

        @self._slot(26, c_char_p, POINTER(c_void_p))
        def create_custom_op_domain(name, out):
            out[0] = 1

        @self._slot(27, c_void_p, c_void_p)
        def custom_op_domain_add(domain, operator):
            self._operators.append(operator)

        @self._slot(28, c_void_p, c_void_p)
        @self._slot(93, c_void_p)
        @self._slot(98, c_void_p)
        @self._slot(130, c_void_p, c_char_p, c_char_p)
        @self._slot(237, c_void_p, c_char_p, POINTER(c_int))
        def succeed(*arguments):
            return None

    def _fill_node(self) -> None:
        def write(text, out, size):
            size[0] = len(text) + 1
            if out:
                ctypes.memmove(out, text + b"\0", len(text) + 1)

        @self._slot(87, c_void_p, c_char_p, c_void_p, POINTER(c_size_t))
        def read_text(info, name, out, size):
            write(self.node.attributes.get(name.decode(), b""), out, size)

        @self._slot(163, c_void_p, c_char_p, POINTER(c_int64), POINTER(c_size_t))
        def read_integers(info, name, out, count):
            values = self.node.attributes.get(name.decode())
            if values is None:
                self._messages.append(f"no attribute {name.decode()}")
                return len(self._messages)
            count[0] = len(values)
            for i, value in enumerate(values if out else ()):
                out[i] = value
            return None

        @self._slot(244, c_void_p, c_void_p, POINTER(c_size_t))
        def read_name(info, out, size):
            write(self.node.proto.name.encode(), out, size)

        @self._slot(230, c_void_p, POINTER(c_size_t))
        def count_inputs(info, out):
            out[0] = len(self.node.inputs)

        @self._slot(231, c_void_p, POINTER(c_size_t))
        def count_outputs(info, out):
            out[0] = len(self.node.outputs)

        @self._slot(233, c_void_p, c_size_t, c_void_p, POINTER(c_size_t))
        def read_output_name(info, index, out, size):
            write(self.node.proto.output[index].encode(), out, size)

        # The type serves as its own description here.
        @self._slot(234, c_void_p, c_size_t, POINTER(c_void_p))
        def describe_input(info, index, out):
            out[0] = self.node.inputs[index]

        @self._slot(235, c_void_p, c_size_t, POINTER(c_void_p))
        def describe_output(info, index, out):
            out[0] = self.node.outputs[index]

        @self._slot(56, c_void_p, POINTER(c_int))
        def is_tensor(info, out):
            out[0] = 1

        @self._slot(55, c_void_p, POINTER(c_void_p))
        @self._slot(60, c_void_p, POINTER(c_int))
        def same(info, out):
            out[0] = info

    def _fill_call(self) -> None:
        @self._slot(90, c_void_p, c_size_t, POINTER(c_void_p))
        def get_input(context, index, out):
            out[0] = self._handle(self._given[index])

        @self._slot(91, c_void_p, c_size_t, POINTER(c_int64), c_size_t, POINTER(c_void_p))
        def get_output(context, index, sizes, rank, out):
            self._made[index] = self.device.allocate(sizes[0:rank], self.node.outputs[index])
            out[0] = self._handle(self._made[index])

        @self._slot(51, c_void_p, POINTER(c_void_p))
        def get_data(value, out):
            out[0] = self._values[value - 1].address

        @self._slot(414, c_void_p, POINTER(c_int), POINTER(c_void_p), POINTER(c_size_t))
        def get_shape(value, kind, sizes, rank):
            found = self._values[value - 1]
            kind[0], sizes[0], rank[0] = found.type, ctypes.addressof(found.sizes), len(found.sizes)

        @self._slot(194, c_void_p, POINTER(c_void_p))
        def get_memory(value, out):
            out[0] = 1

        @self._slot(72, c_void_p, POINTER(c_int))
        def get_device_number(memory, out):
            out[0] = 0

        @self._slot(193, c_void_p, POINTER(c_void_p))
        def get_stream(context, out):
            out[0] = STREAM

    def _register(self) -> None:
        get_api = CFUNCTYPE(c_void_p, c_uint32)(lambda version: ctypes.addressof(self._table))
        version = ctypes.create_string_buffer(b"1.31.1")
        get_version = CFUNCTYPE(c_void_p)(lambda: ctypes.addressof(version))
        base = (c_void_p * 2)(ctypes.cast(get_api, c_void_p), ctypes.cast(get_version, c_void_p))
        register = ctypes.CDLL(torch2ort.custom_ops_library_path()).RegisterCustomOps
        register.restype, register.argtypes = c_void_p, (c_void_p, c_void_p)
        self._check(register(None, base))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p), ("device_type", c_int), ("device_number", c_int), ("rank", c_int),
        ("dtype", c_uint32), ("sizes", c_void_p), ("strides", c_void_p), ("offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint64), ("owner", c_void_p), ("deleter", c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _DLTensor),
    )  # fmt: skip


_EXCHANGE = b"dlpack_exchange_api"
_get_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_lent: list[Any] = []  # kept alive for good, as the library holds their addresses


def on_device(capsule: Any) -> Any:
    """Relabel a DLPack capsule of the host as one of the device."""
    _DLTensor.from_address(_get_pointer(capsule, b"dltensor")).device_type = DEVICE_TYPE
    return capsule


def lend_device_to_torch(lent: Device, on_host: Callable[[torch.Tensor], bool]) -> None:
    """Make a PyTorch without CUDA treat the device's memory and its own results as CUDA tensors.

    Tensors that pass between PyTorch and the library are relabelled, and the operators that the library
    itself calls are recorded.

    Args:
        lent: the device that owns the memory.
        on_host: whether a tensor that the library asks about is reported as the host's.
    """
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    make = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
    theirs = (c_void_p * 7).from_address(_get_pointer(capsule, _EXCHANGE))
    from_object = PYFUNCTYPE(c_int, py_object, POINTER(POINTER(_Managed)))
    to_object = PYFUNCTYPE(c_int, POINTER(_Managed), c_void_p)
    allocator = PYFUNCTYPE(c_int, POINTER(_DLTensor), POINTER(POINTER(_Managed)), c_void_p, c_void_p)
    view_of = PYFUNCTYPE(c_int, py_object, POINTER(_DLTensor))

    @from_object
    def export(tensor, out):
        status = from_object(theirs[3])(tensor, out)
        out[0].contents.tensor.device_type = 1 if on_host(tensor) else DEVICE_TYPE
        return status

    @to_object
    def receive(managed, out):
        assert managed.contents.tensor.device_type == DEVICE_TYPE
        managed.contents.tensor.device_type = 1
        status = to_object(theirs[4])(managed, out)
        managed.contents.tensor.device_type = DEVICE_TYPE
        return status

    @view_of
    def view(tensor, out):
        status = view_of(theirs[5])(tensor, out)
        out[0].device_type = 1 if on_host(tensor) else DEVICE_TYPE
        return status

    @allocator
    def allocate(prototype, out, context, set_error):
        assert prototype[0].device_type == DEVICE_TYPE
        host = _DLTensor.from_buffer_copy(prototype[0])
        host.device_type = 1
        status = allocator(theirs[2])(host, out, context, set_error)
        out[0].contents.tensor.device_type = DEVICE_TYPE
        return status

    ours = (c_void_p * 7)(*theirs)
    for slot, function in ((2, allocate), (3, export), (4, receive), (5, view)):
        ours[slot] = ctypes.cast(function, c_void_p).value
    native.configure(
        exchange_api=make(ctypes.addressof(ours), _EXCHANGE, None),
        tensor_type=torch.Tensor,
        privatize=configured._privatize,
        warn_alias=configured._warn_alias,
        use_count=configured.private.use_count,
        is_base_held=configured.private.is_base_held,
        error_type=torch2ort.EngineError,
        inplace_error_type=torch2ort.InplaceMapError,
    )
    for name in ("clone", "copy_", "zero_"):
        _note(lent, name)
    cuda: Any = torch.cuda
    cuda.ExternalStream = lambda address, device: (address, device.index)
    cuda.stream = lambda stream: Stream(lent, *stream)
    cuda.is_current_stream_capturing = lambda: False
    _lent.append((ours, allocate, export, receive, view))


def _note(device: Device, name: str) -> None:
    original = getattr(torch.Tensor, name)

    def noted(self: torch.Tensor, *args: Any) -> Any:
        with device.work(f"{name}(non_blocking={args[1]})" if args[1:] else name):
            return original(self, *args)

    setattr(torch.Tensor, name, noted)
