"""The nodes of a translated graph after simplification."""

import torch
import torch.nn.functional as F

import torch2ort
from tests.support.callable_module import CallableModule

X = torch.randn(1, 1, 3, 4)


def test_a_graph_holds_no_constant_that_nobody_reads():
    def attend(model, h):
        return F.scaled_dot_product_attention(h, h, h, attn_mask=h[..., :1] > h[..., :1].mT)

    model = CallableModule(attend)
    exported = torch2ort.export(model, X)
    graph = exported.proto.graph
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    assert [tensor.name for tensor in graph.initializer if tensor.name not in read] == []
    torch.testing.assert_close(exported(X), model(X))
