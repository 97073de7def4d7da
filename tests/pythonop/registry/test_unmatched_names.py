"""Names that never match: a typo is reported once, with the likely name, and nothing else is."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch2ort


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Relu(Gelu):
    pass


NAME = f"{__name__}.Gelu"


def nothing(g, x):
    return None


def export(*functions):
    class Model(torch.nn.Module):
        def forward(self, x):
            for function in functions:
                x = function.apply(x)
            return x + 1

    torch2ort.export(Model(), torch.randn(3))


def reports(*functions):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(*functions)
    return [str(w.message) for w in caught if issubclass(w.category, torch2ort.Torch2OrtWarning)]


def test_a_typo_is_reported_with_the_nearest_name():
    torch2ort.register_exporter(f"{__name__}.Geluu", nothing)
    assert reports(Gelu) == [
        f"register_exporter: '{__name__}.Geluu' matches no Function of the exported model, and none of that "
        f"name is "
        f"defined; the nearest names that exist are '{NAME}'"
    ]


def test_a_typo_is_reported_once():
    torch2ort.register_shape_inferer(f"{__name__}.Geluu", lambda node, shapes, dtypes: (shapes, dtypes))
    reports(Gelu)
    assert reports(Gelu) == []


def test_a_name_that_is_registered_again_is_looked_at_again():
    torch2ort.register_exporter(f"{__name__}.Geluu", nothing)
    reports(Gelu)
    torch2ort.register_exporter(f"{__name__}.Geluu", nothing, override=True)
    assert len(reports(Gelu)) == 1


def test_the_path_of_an_import_is_no_qualified_name():
    torch2ort.register_inplace_map("torch2ort.Gelu", forward={0: 0})
    assert reports(Gelu) == [
        f"register_inplace_map: 'torch2ort.Gelu' matches no Function of the exported model, and none of "
        f"that name "
        f"is defined; the nearest names that exist are '{NAME}'"
    ]


def test_a_typo_in_a_module_that_is_not_imported_is_reported_where_a_name_is_near():
    torch2ort.register_exporter(NAME.replace("unmatched", "unmached"), nothing)
    assert len(reports(Gelu)) == 1


def test_a_function_of_another_model_is_no_typo():
    torch2ort.register_exporter(Gelu, nothing)
    torch2ort.register_exporter(f"{__name__}.Relu", nothing)
    assert reports(Gelu) == []


def test_a_function_of_a_library_that_is_not_there_is_no_typo():
    torch2ort.register_exporter("library_that_is_not_there.ops.Softmax", nothing)
    assert reports(Gelu) == []


def test_a_submodule_that_is_not_imported_is_no_typo():
    torch2ort.register_exporter("xml.dom.pulldom.Softmax", nothing)
    assert reports(Gelu) == []


def test_a_name_that_matches_is_no_typo():
    torch2ort.register_exporter(NAME, nothing)
    assert reports(Gelu) == []


def test_a_class_that_was_defined_again_is_reported():
    old = type("Gelu", (Gelu,), {"__module__": __name__})
    torch2ort.register_exporter(old, nothing)
    assert reports(Gelu) == [
        f"register_exporter: '{NAME}' was registered for another class of that name than the one in the "
        f"exported "
        f"model (a class that was defined again?); register the new class with override=True"
    ]


def test_built_in_handlers_are_never_reported():
    assert reports(Gelu) == []


def test_an_operator_that_its_library_does_not_define_is_reported_with_the_nearest():
    torch.library.define("torch2ort_tests::scale_by", "(Tensor x) -> Tensor")
    torch2ort.register_symbolic("torch2ort_tests::scaleby", lambda g, x: x)
    torch.ops.torch2ort_tests.scale_by  # noqa: B018 - torch lists an operator that was looked up
    assert reports(Gelu) == [
        "register_symbolic: the library 'torch2ort_tests' has no operator 'torch2ort_tests::scaleby'; did "
        "you mean "
        "'torch2ort_tests::scale_by'?"
    ]


def test_a_report_that_is_made_an_error_leaves_no_export():
    torch2ort.register_exporter(f"{__name__}.Geluu", nothing)
    with pytest.raises(torch2ort.Torch2OrtWarning):
        export(Gelu)
