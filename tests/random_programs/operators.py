"""The operators that random programs use, as lines of Python.

Each variable has a kind, its name's first letter: ``x`` float (rows, 4); ``v`` float (4,); ``r`` float
(rows,); ``s`` a float without dimensions; ``m`` bool (rows, 4); ``k`` int64 (rows,) of 0 to 3.
Values stay small, so that rounding does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.random_programs import mutable_attributes, submodules


@dataclass(frozen=True)
class Operator:
    """One line of forward.

    Attributes:
        inputs: kind of each variable that it reads.
        outputs: kind of each that it makes; none if it only writes.
        code: the line, with ``{o}``, ``{p}`` for what it makes and ``{a}``, ``{b}``, ``{c}`` for what it
            reads.
            ``self.NAME`` is a member of ``MEMBERS``; ``flag`` and ``scale`` are arguments of forward.
    """

    inputs: str
    outputs: str
    code: str


# Members of the model that statements name, each with the line that makes it.
MEMBERS = {
    "linear": "self.linear = torch.nn.Linear(4, 4)",
    "other": "self.other = torch.nn.Linear(4, 4, bias=False)",
    "tied": "self.tied = torch.nn.Linear(4, 4, bias=False)\nself.tied.weight = self.other.weight",
    "gain": "self.gain = torch.nn.Parameter(torch.rand(4) + 0.5)",
    "alpha": "self.alpha = torch.nn.Parameter(torch.tensor(0.7))",
    "layer_norm": "self.layer_norm = torch.nn.LayerNorm(4)",
    "batch_norm": "self.batch_norm = torch.nn.BatchNorm1d(4)",
    "group_norm": "self.group_norm = torch.nn.GroupNorm(2, 4)",
    "dropout": "self.dropout = torch.nn.Dropout(0.5)",
    "embedding": "self.embedding = torch.nn.Embedding(4, 4)",
    "padded": "self.padded = torch.nn.Embedding(4, 4, padding_idx=0)",
    "conv1d": "self.conv1d = torch.nn.Conv1d(1, 1, 3, padding=1)",
    "grouped": "self.grouped = torch.nn.Conv1d(2, 4, 1, groups=2)",
    "conv2d": "self.conv2d = torch.nn.Conv2d(1, 4, 2)",
    "prelu": "self.prelu = torch.nn.PReLU()",
    "gru": "self.gru = torch.nn.GRU(4, 4, batch_first=True)",
    "total": 'self.register_buffer("total", torch.zeros(4))',
    "count": 'self.register_buffer("count", torch.zeros((), dtype=torch.int64))',
    "seen": 'self.register_buffer("seen", torch.zeros(()))',
    "flag": "self.flag = True",
    "factor": "self.factor = 0.75",
    **{
        mutable_attributes.member(name): f"self.{mutable_attributes.member(name)} = {value.made}"
        for name, value in mutable_attributes.HELD.items()
    },
    **{
        submodules.member(name): f"self.{submodules.member(name)} = {part.made}"
        for name, part in submodules.PARTS.items()
    },
}
# Members without a parameter for an optimizer.
UNTRAINED = {
    "dropout",
    "total",
    "count",
    "seen",
    "flag",
    "factor",
    *map(mutable_attributes.member, mutable_attributes.HELD),
}
UNTRAINED |= set(map(submodules.member, submodules.HIDDEN))
# Parameters of one shape, which may be tied.
TIES = (
    ("linear.weight", "other.weight", "tied.weight", "embedding.weight", "padded.weight"),
    ("linear.bias", "gain", "layer_norm.weight", "layer_norm.bias", "batch_norm.weight", "group_norm.bias"),
)
# Members whose line uses another member.
NEEDS = {"tied": ("other",)}

_POINTWISE = {
    "tanh": "torch.tanh({a})",
    "sigmoid": "torch.sigmoid({a})",
    "relu": "torch.relu({a})",
    "gelu": "F.gelu({a})",
    "gelu_tanh": 'F.gelu({a}, approximate="tanh")',
    "silu": "F.silu({a})",
    "softplus": "F.softplus({a})",
    "elu": "F.elu({a})",
    "leaky_relu": "F.leaky_relu({a}, 0.1)",
    "hardswish": "F.hardswish({a})",
    "hardtanh": "F.hardtanh({a})",
    "mish": "F.mish({a})",
    "prelu": "self.prelu({a})",
    "sin": "torch.sin({a})",
    "cos": "{a}.cos()",
    "exp": "torch.exp(-{a}.abs())",
    "log": "torch.log({a}.abs() + 1)",
    "log1p": "torch.log1p({a}.abs())",
    "sqrt": "torch.sqrt({a} * {a} + 1)",
    "rsqrt": "torch.rsqrt({a} * {a} + 1)",
    "reciprocal": "1 / ({a}.abs() + 1)",
    "erf": "torch.erf({a})",
    "atan": "torch.atan({a})",
    "square": "torch.square(torch.tanh({a}))",
    "power": "(torch.sigmoid({a}) + 0.5) ** 1.5",
    "neg": "-{a}",
    "abs": "{a}.abs()",
    "sign": "{a}.sign() + {a}",
    "round": "torch.round({a}) * 0.5 + {a}",
    "floor": "torch.floor({a}) + {a}",
    "fmod": "torch.fmod({a}, 2)",
    "clamp": "{a}.clamp(-1, 1)",
    "clamp_min": "{a}.clamp(min=-0.5)",
    "plus_number": "{a} + 1",
    "minus_number": "2 - {a}",
    "times_number": "{a} * 0.5",
    "by_number": "{a} / 2",
    "times_attribute": "{a} * self.factor",
    "times_argument": "{a} * scale",
    "double": "torch.tanh({a}.double()).float()",
    "nan_to_num": "torch.nan_to_num({a})",
    "clone": "{a}.clone()",
    "detach": "{a}.detach()",
    "where_number": "torch.where({a} > 0, {a}, {a} * 0.1)",
    "masked_fill": "{a}.masked_fill({a} > 1, 0.5)",
    "softmax": "torch.softmax({a}, -1)",
    "softmax_rows": "{a}.softmax(0)",
    "log_softmax": "torch.log_softmax({a}, -1)",
    "cumsum": "torch.cumsum({a}, 1)",
    "sort": "{a}.sort(-1).values",
    "flip": "{a}.flip(1)",
    "roll": "{a}.roll(1, 1)",
    "tril": "torch.tril({a})",
    "normalize": "F.normalize({a}, dim=-1)",
    "center": "{a} - {a}.mean(-1, keepdim=True)",
    "rms_norm": "F.rms_norm({a}, (4,))",
    "cummax": "{a}.cummax(1).values",
    # modules
    "linear": "self.linear({a})",
    "other": "self.other({a})",
    "tied": "self.tied({a})",
    "functional_linear": "F.linear({a}, self.other.weight, self.gain)",
    "layer_norm": "self.layer_norm({a})",
    "batch_norm": "self.batch_norm({a})",
    "group_norm": "self.group_norm({a})",
    "functional_norm": "F.layer_norm({a}, (4,))",
    "conv1d": "self.conv1d({a}.unsqueeze(1)).squeeze(1)",
    "grouped": "self.grouped({a}.view(-1, 2, 2)).mean(-1)",
    "conv2d": "self.conv2d({a}.view(-1, 1, 2, 2)).flatten(1)",
    "max_pool": "F.max_pool1d({a}.unsqueeze(1), 3, 1, 1).squeeze(1)",
    "avg_pool": "F.avg_pool1d({a}.unsqueeze(1), 3, 1, 1).squeeze(1)",
    "pad": "F.pad({a}, (1, 0))[:, :4]",
    "gru": "self.gru({a}.unsqueeze(1))[0].squeeze(1)",
    "dropout": "self.dropout({a})",
    "functional_dropout": "F.dropout({a}, 0.3, training=self.training)",
    "always_dropout": "F.dropout({a}, 0.3)",
    # random numbers
    "rand_like": "{a} * torch.rand({a}.shape).to({a})",
    "randn": "{a} + torch.randn({a}.shape).to({a}) * 0.1",
    # views, and what undoes them
    "view": "{a}.view(-1, 2, 2).view(-1, 4)",
    "reshape": "{a}.t().reshape(4, -1).t()",
    "transpose": "{a}.t().sin().t()",
    "alias": "{a}[:]",
    "view_as": "{a}.view_as({a})",
    "permute": "{a}.view(-1, 2, 2).permute(0, 2, 1).reshape(-1, 4)",
    "expand": "{a}[:, :1].expand(-1, 4)",
    "repeat": "{a}[:, :2].repeat(1, 2)",
    "chunk": "torch.cat({a}.chunk(2, 1)[::-1], 1)",
    "split": "torch.cat({a}.split([1, 3], 1), 1)",
    "unbind": "torch.stack({a}.unbind(1)[::-1], 1)",
    "contiguous": "{a}.contiguous()",
    # indexing
    "select_columns": "{a}[:, [3, 2, 1, 0]]",
    "index_select": "{a}.index_select(1, torch.tensor([0, 0, 2, 3]))",
    "slices": "torch.cat([{a}[:, 2:], {a}[:, :2]], 1)",
    "step_slice": "{a}[:, ::2].repeat_interleave(2, 1)",
    "topk": "{a}.topk(4, -1).values",
    "gather_sorted": "{a}.gather(1, {a}.argsort(1))",
}
_TWO = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul": "torch.tanh({a}) * {b}",
    "div": "{a} / ({b}.abs() + 1)",
    "maximum": "torch.maximum({a}, {b})",
    "minimum": "torch.minimum({a}, {b})",
    "lerp": "torch.lerp({a}, {b}, 0.3)",
    "addcmul": "torch.addcmul({a}, torch.tanh({a}), torch.tanh({b}), value=0.5)",
    "atan2": "torch.atan2({a}, {b}.abs() + 1)",
    "hypot": "torch.sqrt({a} ** 2 + {b} ** 2 + 1)",
    "where": "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "cat": "torch.cat([{a}, {b}], 1)[:, 2:6]",
    "stack": "torch.stack([{a}, {b}]).mean(0)",
    "attention": "torch.softmax({a} @ {b}.t(), -1) @ {b}",
    "sdpa": "F.scaled_dot_product_attention({a}[None], {b}[None], {b}[None])[0]",
    "matmul": "{a} @ self.linear.weight.t() * 0.5 + {b}",
    "bmm": "torch.bmm({a}.unsqueeze(1), {b}.view(-1, 4, 1)).view(-1, 1) * {a} * 0.2",
    "einsum": 'torch.tanh(torch.einsum("ni,nj->ni", {a}, {b}))',
    "bilinear": "torch.tanh({a} @ ({a}.t() @ {b}) * 0.1)",
    "glu": "F.glu(torch.cat([{a}, {b}], 1), 1)",
}
_INPLACE = {
    "write_mul": ("x", "{a}.mul_(0.5)"),
    "write_add": ("xx", "{a}.add_({b})"),
    "write_plus": ("xx", "{a} += {b}.detach()"),
    "write_relu": ("x", "F.relu_({a})"),
    "write_tanh": ("x", "{a}.tanh_()"),
    "write_column": ("x", "{a}[:, 0] = 0.5"),
    "write_columns": ("xx", "{a}[:, 2:] = {b}[:, :2]"),
    "write_row": ("xx", "{a}[:1].add_({b}[:1])"),
    "write_transposed": ("x", "{a}.t().mul_(2)"),
    "write_viewed": ("x", "{a}.view(-1)[1:].mul_(0.5)"),
    "write_copy": ("xx", "{a}.copy_({b})"),
    "write_masked": ("xm", "{a}.masked_fill_({b}, 0.25)"),
    "write_index": ("xm", "{a}[{b}] = 0.1"),
    "write_detached": ("x", "{a}.detach().mul_(0.5)"),
    "write_clamp": ("x", "{a}.clamp_(-1, 1)"),
    "write_zero": ("x", "{a}[:, :2].zero_()"),
    "write_column_of": ("xr", "{a}[:, 2] = {b}"),
    "write_total": ("v", "self.total.mul_(0.9).add_({a}.detach(), alpha=0.1)"),
    "assign_total": ("v", "self.total = self.total * 0.5 + {a}.detach()"),
    "copy_total": ("v", "self.total.copy_({a}.detach())"),
    "write_count": ("", "self.count += 1"),
    "write_data": ("x", "{a}.data.mul_(0.5)"),
}
_MIXED = {
    # to rows
    "sum_rows": ("x", "r", "{a}.sum(-1)"),
    "mean_rows": ("x", "r", "{a}.mean(1)"),
    "max_rows": ("x", "r", "{a}.max(-1).values"),
    "amin_rows": ("x", "r", "{a}.amin(-1)"),
    "std_rows": ("x", "r", "({a} + torch.arange(4)).std(-1)"),
    "norm_rows": ("x", "r", "torch.sqrt({a}.square().sum(-1) + 1)"),
    "logsumexp": ("x", "r", "{a}.logsumexp(-1)"),
    "prod_rows": ("x", "r", "torch.tanh({a}).prod(-1)"),
    "column": ("x", "r", "{a}[:, 1]"),
    "select": ("x", "r", "{a}.select(1, 2)"),
    "cross_entropy_rows": ("xk", "r", 'F.cross_entropy({a}, {b}, reduction="none")'),
    "pick": ("xk", "r", "{a}.gather(1, {b}.unsqueeze(1)).squeeze(1)"),
    "take": ("xk", "r", "{a}[torch.arange({a}.shape[0]), {b}]"),
    "norm_vector": ("x", "r", "torch.linalg.vector_norm({a} + 3, dim=-1)"),
    "rows_tanh": ("r", "r", "torch.tanh({a})"),
    # from rows
    "times_rows": ("xr", "x", "{a} * torch.tanh({b}).unsqueeze(1)"),
    "plus_rows": ("xr", "x", "{a} + {b}[:, None]"),
    "outer": ("rv", "x", "torch.tanh(torch.outer({a}, {b}))"),
    # to a vector
    "mean_columns": ("x", "v", "{a}.sum(0) / ({a}.shape[0] + 1)"),
    "max_columns": ("x", "v", "torch.cat([{a}, torch.zeros(1, 4).to({a})]).amax(0)"),
    "gain": ("", "v", "self.gain * 1"),
    "parameter": ("", "v", "self.gain"),
    "buffer": ("", "v", "self.total + 1"),
    "first_row": ("x", "v", "{a}.sum(0).tanh()"),
    # from a vector
    "times_vector": ("xv", "x", "{a} * {b}"),
    "plus_vector": ("xv", "x", "{a} + {b}"),
    "vector_matrix": ("xv", "r", "{a} @ {b}"),
    "functional_batch_norm": ("xv", "x", "F.batch_norm({a}, {b}.detach() * 0, {b}.detach() * 0 + 1)"),
    # to and from numbers
    "sum_all": ("x", "s", "torch.tanh({a}.sum())"),
    "mean_all": ("x", "s", "{a}.mean()"),
    "rows_to_number": ("r", "s", "{a}.sum().sigmoid()"),
    "cross_entropy": ("xk", "s", "F.cross_entropy({a}, {b})"),
    "smooth_cross_entropy": ("xk", "s", "F.cross_entropy({a}, {b}, label_smoothing=0.1, ignore_index=1)"),
    "nll": ("xk", "s", "F.nll_loss(torch.log_softmax({a}, 1), {b})"),
    "mse": ("xx", "s", "F.mse_loss({a}, {b})"),
    "l1": ("xx", "s", "F.l1_loss({a}, {b})"),
    "smooth_l1": ("xx", "s", "F.smooth_l1_loss({a}, {b})"),
    "bce": ("xm", "s", "F.binary_cross_entropy_with_logits({a}, {b}.to({a}.dtype))"),
    "kl_div": ("xx", "s", 'F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction="sum") * 0.1'),
    "alpha": ("", "s", "self.alpha * 2"),
    "times_scalar": ("xs", "x", "{a} * {b}"),
    "plus_scalar": ("xs", "x", "{a} + {b}"),
    # masks and indices
    "positive": ("x", "m", "{a} > 0"),
    "greater": ("xx", "m", "{a} >= {b}"),
    "not": ("m", "m", "~{a}"),
    "and": ("mm", "m", "{a} & {b}"),
    "where_mask": ("mxx", "x", "torch.where({a}, {b}, {c})"),
    "mask_times": ("xm", "x", "{a} * {b}"),
    "fill_mask": ("xm", "x", "{a}.masked_fill({b}, -1.0)"),
    "argmax": ("x", "k", "{a}.argmax(-1)"),
    "next_index": ("k", "k", "({a} + 1) % 4"),
    "equal_index": ("km", "m", "({a} == 2).unsqueeze(1) | {b}"),
    "embedding": ("k", "x", "self.embedding({a})"),
    "padded": ("k", "x", "self.padded({a})"),
    "functional_embedding": ("k", "x", "F.embedding({a}, self.other.weight)"),
    "one_hot": ("k", "x", "F.one_hot({a}, 4).to(self.gain.dtype)"),
    "index_weight": ("k", "x", "self.other.weight[{a}]"),
    "scatter": ("xkr", "x", "{a}.scatter(1, {b}.unsqueeze(1), {c}.unsqueeze(1))"),
    "scatter_add": ("xkr", "x", "{a}.scatter_add(1, {b}.unsqueeze(1), {c}.unsqueeze(1))"),
    "index_add": ("xk", "v", "torch.tanh(torch.zeros(4).to({a}).index_add(0, {b}, {a}[:, 0]))"),
    "max_both": ("x", "rk", "{a}.max(-1)"),
    "halves": ("x", "xx", "(t * 2 for t in ({a}, {a} + 1))"),
    "views": ("x", "xx", "torch.stack([{a}, {a}.sin()]).unbind(0)"),
}

# Numbers that are nearly 0 or nearly 1, and lines whose result shows it: by a sign, a logarithm, a quotient.
NEAR_ZERO = ("1e-45", "1e-40", "1e-30", "1e-20", "1e-12", "1e-9", "1e-8", "1e-7", "1e-5")
NEAR_ONE = ("0.99999994", "0.999999", "0.99999", "1.00000012", "1.000001", "1.00001")
_WHOLE = "torch.ceil({a}.abs() + 1)"
_OF_NEAR_ZERO = {
    "plus": "torch.log(F.relu({a}) + NUMBER) * 0.1",
    "plus_tensor": "torch.log(torch.tensor(NUMBER).to({a}) + F.relu({a})) * 0.1",
    "minus": "{a} + torch.sign(F.relu({a}) - NUMBER)",
    "subtracted_from": "{a} + torch.sign(NUMBER - F.relu({a}))",
    "times": "{a} + torch.sign({a} * NUMBER)",
    "divided_by": "{a} + torch.tanh({a} / NUMBER)",
    "sum_plus": "F.relu({a} - 1) / (F.relu({a} - 1).sum(-1, keepdim=True) + NUMBER)",
    "clamp_to": "torch.log({a}.clamp(min=NUMBER)) * 0.1",
    "alpha_of": "{a} + torch.sign(torch.add(F.relu({a}) * 0, {a}, alpha=NUMBER))",
    "slope_of": "{a} + torch.sign(F.leaky_relu({a}, NUMBER))",
    "less_than": "torch.where(F.relu({a}) < NUMBER, -1.0, {a})",
    "eps_of": "F.layer_norm({a}, (4,), eps=NUMBER)",
}
_OF_NEAR_ONE = {
    "times": f"{{a}} + torch.sign({_WHOLE} * NUMBER - {_WHOLE})",
    "times_tensor": f"{{a}} + torch.sign(torch.tensor(NUMBER).to({{a}}) * {_WHOLE} - {_WHOLE})",
    "divided_by": f"{{a}} + torch.sign({_WHOLE} / NUMBER - {_WHOLE})",
    "minus": f"{{a}} + torch.sign(torch.sign({_WHOLE}) - NUMBER)",
    "power_of": f"{{a}} + torch.sign({_WHOLE} ** NUMBER - {_WHOLE})",
}
OF_NUMBERS = {
    f"{form} {number}": code.replace("NUMBER", number)
    for forms, numbers in ((_OF_NEAR_ZERO, NEAR_ZERO), (_OF_NEAR_ONE, NEAR_ONE))
    for form, code in forms.items()
    for number in numbers
}

# Operators that read an object of the model, by its name in ``mutable_attributes.HELD``, or call a part.
OF_HELD = {name: f"held {name}" for name in mutable_attributes.HELD}
OF_PARTS = {name: f"part {name}" for name in submodules.PARTS}
OPERATORS: dict[str, Operator] = {
    **{name: Operator("x", "x", "{o} = " + code) for name, code in _POINTWISE.items()},
    **{name: Operator("xx", "x", "{o} = " + code) for name, code in _TWO.items()},
    **{name: Operator(inputs, "", code) for name, (inputs, code) in _INPLACE.items()},
    **{
        name: Operator(inputs, outputs, ("{o}, {p} = " if len(outputs) > 1 else "{o} = ") + code)
        for name, (inputs, outputs, code) in _MIXED.items()
    },
    **{
        operator: Operator("x", "x", f"{{o}} = {{a}} * ({mutable_attributes.reads(name)})")
        for name, operator in OF_HELD.items()
    },
    **{
        operator: Operator("x", "x", f"{{o}} = {submodules.call(name)}({{a}})")
        for name, operator in OF_PARTS.items()
    },
    **{name: Operator("x", "x", "{o} = " + code) for name, code in OF_NUMBERS.items()},
}
# Operators that are drawn as a variation of a program.
VARIED = {*OF_HELD.values(), *OF_PARTS.values(), *OF_NUMBERS}
# The names of an operator's inputs in its line.
PLACES = "abc"
