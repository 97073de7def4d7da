"""Optimizers of the trainer, and learning rate schedulers."""

from torch2ort.trainer.optim import lr_scheduler
from torch2ort.trainer.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from torch2ort.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

__all__ = [
    "AdamConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
    "lr_scheduler",
]
