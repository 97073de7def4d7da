"""Derivatives that a kernel's output mask excludes: of frozen weights, and of inputs without gradient."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort

MODULES = {
    "batch norm": (torch.nn.BatchNorm1d(4), (3, 4)),
    "batch norm, evaluated": (torch.nn.BatchNorm1d(4).eval(), (3, 4)),
    "layer norm": (torch.nn.LayerNorm(4), (3, 4)),
    "group norm": (torch.nn.GroupNorm(2, 4), (3, 4, 2)),
    "instance norm": (torch.nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "rms norm": (torch.nn.RMSNorm(4), (3, 4)),
    "convolution": (torch.nn.Conv1d(4, 4, 1), (3, 4, 2)),
    "transposed convolution": (torch.nn.ConvTranspose1d(4, 4, 2), (3, 4, 2)),
    "grouped convolution": (torch.nn.Conv2d(4, 4, 1, groups=2), (3, 4, 2, 2)),
}


@pytest.mark.parametrize(("requires_grad", "frozen"), [(False, None), (True, "weight")])
@pytest.mark.parametrize("name", MODULES)
def test_the_gradients_that_are_left_are_eagers(name, requires_grad, frozen):
    layer, shape = MODULES[name]
    eager = copy.deepcopy(layer)
    for parameter, value in eager.named_parameters():
        value.requires_grad_(parameter != frozen)
    torch.manual_seed(0)
    x = torch.randn(shape)
    found = []
    for model in (eager, torch2ort.ORTModule(copy.deepcopy(eager))):
        given = x.clone().requires_grad_(requires_grad)
        output = model(given)
        if output.requires_grad:
            (output * torch.arange(output.numel()).view_as(output)).sum().backward()
        found.append([output, given.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
