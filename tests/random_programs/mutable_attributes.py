"""Objects that a random program's model holds: read in forward, and changed between calls or by forward.

Python's, NumPy's and torch's own classes are here beside plain containers, as their code is not analysed:
their state is found in the object or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """One object.

    Attributes:
        made: the expression that makes it.
        read: the expression of forward that reads it, as ``{held}``: a small number.
        change: the statement of the script that changes it; empty where forward itself does.
    """

    made: str
    read: str
    change: str = ""


HELD = {
    "list": Held("[0.5, 2.0]", "{held}[-1] * len({held})", "{held}.append(0.25)"),
    "dict": Held('{"a": 0.5}', "sum({held}.values())", '{held}["b"] = 0.75'),
    "set": Held("{1, 2}", "len({held}) * 0.5", "{held}.add(3)"),
    "bytes": Held("bytearray([2, 3])", "{held}[0] * 0.25", "{held}[0] = 5"),
    "closure": Held(
        "(lambda box: lambda: box[0])([0.5])", "{held}()", "{held}.__closure__[0].cell_contents[0] = 2"
    ),
    "space": Held("types.SimpleNamespace(scale=0.5)", "{held}.scale", "{held}.scale = 0.75"),
    "partial": Held("functools.partial(round, ndigits=1)", "{held}(0.66)", '{held}.keywords["ndigits"] = 0'),
    "deque": Held("collections.deque([0.5, 2.0], maxlen=2)", "{held}[0]", "{held}.append(0.25)"),
    "counter": Held('collections.Counter("aab")', '{held}["a"] * 0.25', '{held}.update("a")'),
    "chain": Held('collections.ChainMap({}, {"a": 0.5})', '{held}["a"]', '{held}["a"] = 0.75'),
    "ordered": Held(
        "collections.OrderedDict(a=0.5, b=2.0)", "next(iter({held}.values()))", '{held}.move_to_end("a")'
    ),
    "event": Held("threading.Event()", "0.5 + {held}.is_set()", "{held}.set()"),
    "queue": Held("queue.Queue()", "0.5 + {held}.qsize()", "{held}.put(1)"),
    "context": Held('contextvars.ContextVar("held", default=0.5)', "{held}.get()", "{held}.set(0.75)"),
    "config": Held(
        'configparser.ConfigParser({"a": "0.5"})',
        '{held}.getfloat("DEFAULT", "a")',
        '{held}["DEFAULT"]["a"] = "0.75"',
    ),
    "c number": Held("ctypes.c_double(0.5)", "{held}.value", "{held}.value = 0.75"),
    "array": Held('array.array("d", [0.5])', "{held}[0]", "{held}[0] = 0.75"),
    "fraction": Held("fractions.Fraction(1, 2)", "float({held})", "{held} = fractions.Fraction(3, 4)"),
    "numbers": Held("np.array([0.5, 2.0])", "float({held}.sum())", "{held}[0] = 0.75"),
    "polynomial": Held(
        "np.polynomial.Polynomial([0.5, 1.0])", "float({held}(0.25))", "{held}.coef[0] = 0.75"
    ),
    "tensor": Held("torch.tensor(0.5)", "{held}", "{held}.fill_(0.75)"),
    "pair": Held("(torch.tensor(0.5), [1.0])", "{held}[0] * {held}[1][0]", "{held}[1][0] = 1.5"),
    "distribution": Held("torch.distributions.Normal(0.5, 1.0)", "{held}.mean", "{held}.loc.fill_(0.75)"),
    # forward changes them
    "grown": Held("[]", "({held}.append(1) or len({held}) * 0.5)"),
    "counted": Held("{}", "{held}.setdefault(len({held}), 0.25 * len({held}))"),
    "emptied": Held("collections.deque([0.5, 0.75, 1.0, 1.25] * 8)", "{held}.popleft()"),
    "steps": Held("itertools.count(1)", "0.5 * (next({held}) % 3)"),
    "cycle": Held("itertools.cycle([0.5, 0.75, 1.0])", "next({held})"),
    "taken": Held("iter([0.5, 0.75, 1.0, 1.25] * 8)", "next({held})"),
    "random": Held("random.Random(3)", "{held}.random()"),
    "random numbers": Held("np.random.default_rng(3)", "float({held}.random())"),
}


def member(name: str) -> str:
    """The attribute of the model that holds an object."""
    return "held_" + name.replace(" ", "_")


def reads(name: str, owner: str = "self") -> str:
    """The expression that reads an object, which ``owner`` holds."""
    return HELD[name].read.format(held=f"{owner}.{member(name)}")


def change(name: str) -> str:
    """The script's line that changes an object; empty where only forward does."""
    return HELD[name].change.format(held=f"model.{member(name)}")
