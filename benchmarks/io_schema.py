"""The cost of the check of a step's inputs, as a ratio to ``optree.tree_flatten`` of the same data."""

from __future__ import annotations

from typing import Any

import optree
import torch
from _timing import interleaved_medians
from torch import Tensor

from torch2ort import io_schema

LEAVES = 100


def structures(tensors: list[Tensor]) -> dict[str, Any]:
    """Return structures of 100 leaves, in one container or in 82, and one half of which are constants."""
    layers = [
        {
            "qk": (tensors[i], tensors[i + 1]),
            "v": tensors[i + 2],
            "o": {"w": tensors[i + 3]},
            "b": [tensors[i + 4]],
        }
        for i in range(0, LEAVES, 5)
    ]
    constants = [1.5, "a", None, True]
    return {
        "tuple": tuple(tensors),
        "dict": {f"x{i}": tensor for i, tensor in enumerate(tensors)},
        "nested": {"layers": layers},
        "half constants": [tensor if i % 2 else constants[i // 2 % 4] for i, tensor in enumerate(tensors)],
    }


def ratios(data: Any) -> tuple[float, float]:
    """Return the cost of `flatten` with a comparison, and of `match`, as ratios to `optree.tree_flatten`."""
    tensors, schema = io_schema.flatten(data)
    in_optree = [leaf for leaf in optree.tree_leaves(data) if isinstance(leaf, Tensor)]
    assert sorted(map(id, in_optree)) == sorted(map(id, tensors))  # optree sorts the keys of a dict
    assert list(map(id, schema.match(data) or ())) == list(map(id, tensors))
    seconds = interleaved_medians(
        {
            "optree": lambda: optree.tree_flatten(data),
            "flatten": lambda: io_schema.flatten(data)[1] == schema,
            "match": lambda: schema.match(data),
        },
        rounds=200,
        calls=50,
    )
    return seconds["flatten"] / seconds["optree"], seconds["match"] / seconds["optree"]


def bert_forward(
    input_ids=None,
    attention_mask=None,
    token_type_ids=None,
    position_ids=None,
    inputs_embeds=None,
    labels=None,
    **kwargs,
):
    """Take the arguments of transformers' BertForSequenceClassification."""


def microseconds_of_a_step() -> float:
    """Return the time to bind a BERT-like call and check its schema, in microseconds."""
    ids = torch.ones(8, 128, dtype=torch.int64)
    call = {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids, "labels": ids[:, 0]}
    signature = io_schema.Signature.of(bert_forward)
    _, schema = io_schema.flatten(signature.bind((), call))
    assert schema.match(signature.bind((), call)) is not None
    seconds = interleaved_medians(
        {"check": lambda: schema.match(signature.bind((), call))}, rounds=200, calls=200
    )
    return seconds["check"] * 1e6


def main() -> None:
    """Time each structure and print one line."""
    torch.set_num_threads(1)
    tensors = [torch.ones(2, 3) for _ in range(LEAVES)]
    found = {name: ratios(data) for name, data in structures(tensors).items()}
    listed = ", ".join(f"{name} {flatten:.2f} ({match:.2f})" for name, (flatten, match) in found.items())
    print(
        f"Schema of {LEAVES} leaves, flatten and compare (match), ratio to optree.tree_flatten: {listed}; "
        f"check of a BERT-like step: {microseconds_of_a_step():.1f} µs"
    )


if __name__ == "__main__":
    main()
