"""ORTTrainer's documented interface, on torch2ort's engines."""

from torch2ort.trainer import amp, optim
from torch2ort.trainer.model_desc import IODescription, ModelDescription
from torch2ort.trainer.options import ORTTrainerOptions
from torch2ort.trainer.options_schema import PropagateCastOpsStrategy
from torch2ort.trainer.step_info import TrainStepInfo
from torch2ort.trainer.trainer import ORTTrainer

__all__ = [
    "IODescription",
    "ModelDescription",
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "TrainStepInfo",
    "amp",
    "optim",
]
