"""Losses between numbers."""

from __future__ import annotations

import torch

from torch2ort.symbolics.decompositions import regression_losses
from torch2ort.training_files.derivatives.registry import derives

aten = torch.ops.aten
derives(aten.mse_loss.default)(regression_losses.mse_loss)
derives(aten.huber_loss.default)(regression_losses.huber_loss)
