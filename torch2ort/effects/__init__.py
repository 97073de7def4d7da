"""Side effects of forward, found during the trace and repeated by each run of the graph."""

from torch2ort.effects.autograd_state_checks import refuse_state
from torch2ort.effects.eager_effect_check import line_of, verify_effects_in_eager
from torch2ort.effects.effect_recorder import SideEffectRecorder
from torch2ort.effects.forbidden_calls import refuse_call, refused_calls
from torch2ort.effects.read_before_write import ReadRecorder
from torch2ort.effects.side_effects import NO_EFFECTS, Effects, Write
from torch2ort.effects.state_diff import EffectError

__all__ = [
    "NO_EFFECTS",
    "EffectError",
    "Effects",
    "ReadRecorder",
    "SideEffectRecorder",
    "Write",
    "line_of",
    "refuse_call",
    "refuse_state",
    "refused_calls",
    "verify_effects_in_eager",
]
