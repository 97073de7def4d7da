"""Mixed precision: scales of losses."""

from torch2ort.trainer.amp import loss_scaler
from torch2ort.trainer.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
