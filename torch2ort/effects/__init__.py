"""What forward does beside computing: found while it is traced, and left by each run of the graph, too."""

from torch2ort.effects.calls import refuse_call, refused_calls
from torch2ort.effects.found import EffectError
from torch2ort.effects.reads import Reads
from torch2ort.effects.tensor_state import refuse_state
from torch2ort.effects.trial import line_of, tried
from torch2ort.effects.watched import Watched
from torch2ort.effects.writes import NO_EFFECTS, Effects, Write

__all__ = [
    "NO_EFFECTS",
    "EffectError",
    "Effects",
    "Reads",
    "Watched",
    "Write",
    "line_of",
    "refuse_call",
    "refuse_state",
    "refused_calls",
    "tried",
]
