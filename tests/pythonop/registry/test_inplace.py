"""In-place maps: a correct one saves the copy, a wrong one is detected, an undeclared one is only slower."""

from __future__ import annotations

import gc
import warnings

import onnx
import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from torch2ort import _native

SEEN: dict[str, list[int]] = {}


class Look(torch.autograd.Function):
    """Records the addresses of its tensors, in both directions."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        SEEN.setdefault(name, []).append(x.data_ptr())
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        SEEN.setdefault(f"{ctx.name} backward", []).append(grad.data_ptr())
        return grad * 1, None


class View(torch.autograd.Function):
    """Its output is its second tensor argument, its gradient the output's gradient."""

    @staticmethod
    def forward(ctx, factor, other, x):
        SEEN.setdefault("View", []).append(x.data_ptr())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        SEEN.setdefault("View backward", []).append(grad.data_ptr())
        return None, grad * 2, grad


class AddInto(torch.autograd.Function):
    """Writes to its argument and returns it."""

    @staticmethod
    def forward(ctx, x, y):
        SEEN.setdefault("AddInto", []).append(x.data_ptr())
        x.add_(y)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.clone()


class Chain(torch.nn.Module):
    """``call`` between two layers; ``beside`` computes another result from the input of ``call``."""

    def __init__(self, call, beside=None):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.other = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 3)
        self._call = call
        self._beside = beside

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * 2
        beside = None if self._beside is None else self._beside(hidden)
        result = self._call(hidden, self.other(x))
        return self.last(result if beside is None else result + beside)


def view(hidden, other):
    return Look.apply(View.apply(0.5, other, Look.apply(hidden, "before")), "after")


def view_apart(hidden, other):
    """Call Functions with operators between them."""
    viewed = View.apply(0.5, other, Look.apply(hidden, "before") * 2)
    return Look.apply(viewed * 2, "after")


def views(hidden, other):
    """Call several Functions in a row."""
    viewed = View.apply(0.5, other, View.apply(0.5, other, Look.apply(hidden, "before")))
    return Look.apply(viewed, "after")


def add_into_thrice(hidden, other):
    added = AddInto.apply(AddInto.apply(AddInto.apply(hidden, other), other), other)
    return Look.apply(added, "after")


def add_into_apart(hidden, other):
    added = AddInto.apply(hidden, other) * 2
    return Look.apply(AddInto.apply(added, other), "after")


def add_into(hidden, other):
    return Look.apply(AddInto.apply(hidden, other), "after")


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def copied_bytes(name):
    """Bytes that the sites of a Function have copied in this process."""
    sites = [site for site in gc.get_objects() if type(site) is _native.Site]
    return sum(site.copied_bytes for site in sites if site.name.endswith(name))


def step(module):
    module(torch.randn(5, 4)).sum().backward()


def settled(call, beside=None):
    """A module after its first step, in which every call is watched for writes."""
    module = torch2ort.ORTModule(Chain(call, beside))
    step(module)
    SEEN.clear()
    return module


def test_a_declared_view_trains_like_eager():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    assert_trains_like_eager(Chain(view), [(torch.randn(5, 4),)], steps=3)


def test_a_declared_view_is_the_arguments_memory():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    step(settled(view))
    assert SEEN["after"] == SEEN["View"]


def test_a_declared_gradient_is_the_output_gradients_memory():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    step(settled(view))
    assert SEEN["View backward"] == SEEN["before backward"]


@pytest.mark.parametrize("call", [view, view_apart, views])
def test_a_declared_map_saves_the_copies(call):
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    module = settled(call)
    before = copied_bytes(".View")
    step(module)
    assert copied_bytes(".View") == before


@pytest.mark.filterwarnings("ignore::torch2ort.Torch2OrtWarning")
def test_without_a_map_output_and_gradient_are_copied():
    module = settled(view_apart)
    before = copied_bytes(".View")
    step(module)
    assert copied_bytes(".View") - before == 2 * 5 * 4 * 4


def test_undeclared_aliasing_warns_once_per_site_with_the_map_to_declare():
    def three_runs():
        module = torch2ort.ORTModule(Chain(view_apart))
        for _ in range(3):
            step(module)

    with pytest.warns(torch2ort.Torch2OrtWarning) as caught:
        three_runs()
    name = f"{View.__module__}.View"
    assert sorted(str(warning.message) for warning in caught) == [
        f"{name}: output 0 shares memory with argument 2, which was made correct by a copy. To save the "
        f"copy, "
        f"declare torch2ort.register_inplace_map('{name}', forward={{0: 2}})",
        f"{name}: the gradient of argument 2 shares memory with the gradient of output 0, which was made "
        f"correct by "
        f"a copy. To save the copy, declare torch2ort.register_inplace_map('{name}', backward={{2: 0}})",
    ]


def test_a_declared_write_happens_in_the_arguments_memory():
    torch2ort.register_inplace_map(AddInto, forward={0: 0}, backward={0: 0})
    step(settled(add_into))
    assert SEEN["after"] == SEEN["AddInto"]


def test_a_row_of_declared_views_is_one_memory():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    step(settled(views))
    assert len({*SEEN["View"], *SEEN["after"]}) == 1
    assert len({*SEEN["View backward"], *SEEN["before backward"]}) == 1


def test_a_row_of_declared_writes_happens_in_one_memory():
    torch2ort.register_inplace_map(AddInto, forward={0: 0}, backward={0: 0})
    step(settled(add_into_thrice))
    assert len(SEEN["AddInto"]) == 3
    assert len({*SEEN["AddInto"], *SEEN["after"]}) == 1


@pytest.mark.parametrize("call", [add_into, add_into_thrice, add_into_apart])
def test_a_declared_write_saves_the_copy(call):
    torch2ort.register_inplace_map(AddInto, forward={0: 0}, backward={0: 0})
    module = settled(call)
    before = copied_bytes(".AddInto")
    step(module)
    assert copied_bytes(".AddInto") == before


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(None, id="nobody else reads it"),
        pytest.param(lambda hidden: hidden * 3, id="another operator reads it"),
        pytest.param(lambda hidden: hidden.reshape(-1).reshape(5, 4), id="a reshape shares it"),
        pytest.param(lambda hidden: Look.apply(hidden, "beside"), id="another Function reads it"),
    ],
)
def test_a_declared_write_trains_like_eager_whoever_reads_the_argument(beside):
    torch2ort.register_inplace_map(AddInto, forward={0: 0}, backward={0: 0})
    assert_trains_like_eager(Chain(add_into, beside), [(torch.randn(5, 4),)], steps=3)


def test_a_declared_write_to_the_models_input_reaches_the_caller():
    torch2ort.register_inplace_map(AddInto, forward={0: 0}, backward={0: 0})

    class Writes(torch.nn.Module):
        def forward(self, x, y):
            return AddInto.apply(x, y) * 2

    x, y = torch.randn(3), torch.randn(3)
    expected = x + y
    output = torch2ort.ORTModule(Writes())(x, y)
    torch.testing.assert_close((output, x), (expected * 2, expected))


def test_a_view_that_is_the_models_output_has_memory_of_its_own():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})

    class Ends(torch.nn.Module):
        def forward(self, other, x):
            return View.apply(0.5, other, x)

    other, x = torch.randn(3), torch.randn(3)
    output = torch2ort.ORTModule(Ends())(other, x)
    assert torch.equal(output, x)
    assert output.data_ptr() != x.data_ptr()


def test_the_exported_node_tells_onnxruntimes_planner():
    torch2ort.register_inplace_map(View, forward={0: 2}, backward={2: 0})
    exported = torch2ort.export(Chain(view).train(), torch.randn(5, 4))
    nodes = [
        node for node in exported.proto.graph.node if len(node.input) == 2 and node.op_type == "PythonOp"
    ]
    maps = {a.name: list(a.ints) for a in nodes[0].attribute if a.name.endswith("reuse_map")}
    # By the node's inputs and outputs: the context precedes the outputs, and the gradients.
    assert maps == {"tensor_reuse_map": [-1, 1], "bw_tensor_reuse_map": [-1, 1]}


def test_a_saved_and_loaded_model_keeps_its_map(tmp_path):
    torch2ort.register_inplace_map(View, forward={0: 2})
    torch2ort.export(Chain(view).eval(), torch.randn(5, 4)).save(tmp_path / "model.onnx")
    torch2ort.unregister(View)
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[View, Look])
    loaded(torch.randn(5, 4))
    SEEN.clear()
    loaded(torch.randn(5, 4))
    assert SEEN["after"] == SEEN["View"]


class Copies(torch.autograd.Function):
    """Shares no memory, whatever a map says."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, grad * 3


def test_a_false_map_is_found_out_at_export():
    torch2ort.register_inplace_map(Copies, forward={0: 1})
    with pytest.raises(torch2ort.InplaceMapError) as error:
        torch2ort.export(Chain(Copies.apply), torch.randn(5, 4))
    assert str(error.value) == (
        f"{__name__}.Copies: the in-place map says that output 0 of forward is the memory of argument 1, but "
        f"forward returned other memory: correct the map or unregister it"
    )


def test_a_false_backward_map_is_found_out_in_the_first_backward():
    torch2ort.register_inplace_map(Copies, backward={0: 0})
    output = torch2ort.ORTModule(Chain(Copies.apply))(torch.randn(5, 4))
    with pytest.raises(torch2ort.InplaceMapError) as error:
        output.sum().backward()
    assert str(error.value) == (
        f"{__name__}.Copies: the in-place map says that the gradient of argument 0 is the memory of the "
        f"gradient of "
        f"output 0, but backward returned other memory: correct the map or unregister it"
    )


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        (
            {"forward": {1: 0}},
            "the in-place map forward={1: 0} names output 1; the tensors among the 1 outputs are 0",
        ),
        (
            {"forward": {0: 2}},
            "the in-place map forward={0: 2} names argument 2; the tensors among the 2 arguments are 0, 1",
        ),
        (
            {"backward": {0: 3}},
            "the in-place map backward={0: 3} names output 3; the tensors among the 1 outputs are 0",
        ),
        (
            {"backward": {5: 0}},
            "the in-place map backward={5: 0} names argument 5; the tensors among the 2 arguments are 0, 1",
        ),
    ],
)
def test_a_map_out_of_range_is_refused_at_export(declared, sentence):
    torch2ort.register_inplace_map(Copies, **declared)
    with pytest.raises(torch2ort.InplaceMapError) as error:
        torch2ort.export(Chain(Copies.apply), torch.randn(5, 4))
    assert str(error.value) == f"{__name__}.Copies: {sentence}"


class Incumbent(torch.autograd.Function):
    """Written for onnxruntime's ORTModule: it declares its map and shapes itself."""

    @staticmethod
    def forward(ctx, factor, x, y):
        SEEN.setdefault("Incumbent", []).append(y.data_ptr())
        ctx.factor = factor
        return x * factor, y.view_as(y)

    @staticmethod
    def backward(ctx, scaled, passed):
        return None, scaled * ctx.factor, passed

    @staticmethod
    def alias_input(node_proto_str):
        node = onnx.NodeProto()
        node.ParseFromString(node_proto_str)
        assert len(node.output) == 3
        return [-1, 2], [-1, -1, 1]


def test_alias_input_of_an_ortmodule_class_counts_as_registered():
    class Model(torch.nn.Module):
        def forward(self, x):
            scaled, passed = Incumbent.apply(2.0, x * 2, x * 3)
            return Look.apply(passed, "after") + scaled

    module = torch2ort.ORTModule(Model())
    x = torch.randn(5, 4, requires_grad=True)
    module(x)
    SEEN.clear()
    torch.testing.assert_close(module(x), Model()(x))
    assert SEEN["after"][0] == SEEN["Incumbent"][0]


def test_alias_input_of_the_wrong_length_is_refused(monkeypatch):
    monkeypatch.setattr(Incumbent, "alias_input", staticmethod(lambda node: ([-1], [-1, -1, 1])))

    class Model(torch.nn.Module):
        def forward(self, x):
            return Incumbent.apply(2.0, x * 2, x * 3)

    with pytest.raises(torch2ort.InplaceMapError) as error:
        torch2ort.export(Model(), torch.randn(5, 4))
    assert str(error.value) == (
        f"{__name__}.Incumbent: alias_input returned lists of 1 and 3 entries; expected one entry for each "
        f"of 2 "
        f"tensor outputs, and for each of 3 arguments"
    )


def test_alias_input_that_gives_one_memory_to_two_is_refused(monkeypatch):
    monkeypatch.setattr(Incumbent, "alias_input", staticmethod(lambda node: ([2, 2], [-1, -1, -1])))

    class Model(torch.nn.Module):
        def forward(self, x):
            return Incumbent.apply(2.0, x * 2, x * 3)

    with pytest.raises(torch2ort.InplaceMapError) as error:
        torch2ort.export(Model(), torch.randn(5, 4))
    assert str(error.value) == (
        f"{__name__}.Incumbent: alias_input returned [2, 2] for inputs, which gives the same memory to two; "
        f"expected every number but -1 once"
    )


def warned(call, beside=None):
    """The warnings of two steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch2ort.Torch2OrtWarning)
        module = torch2ort.ORTModule(Chain(call, beside))
        step(module)
        step(module)
    return [str(warning.message) for warning in caught]


def test_a_write_to_what_others_read_warns_of_no_map():
    messages = warned(add_into, lambda hidden: hidden.detach() * 3)
    assert not [message for message in messages if "forward={0: 0}" in message]


def test_a_view_that_is_the_models_output_warns_of_no_map():
    class Ends(torch.nn.Module):
        def forward(self, x):
            return View.apply(0.5, x * 2, x * 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch2ort.Torch2OrtWarning)
        torch2ort.ORTModule(Ends())(torch.randn(3))
