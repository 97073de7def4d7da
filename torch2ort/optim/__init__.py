"""Optimizers as functions of tensors, which can be traced into the graph of a training step.

``optimizer(parameters, gradients, state, lr)`` returns the new parameters and the new state, as dicts by the
parameters' names; ``optimizer.init(parameters)`` returns the initial state.

>>> import torch
>>> from torch2ort import optim
>>> sgd = optim.SGD(lr=0.5)
>>> w = {"w": torch.tensor([1.0, 2.0])}
>>> sgd(w, {"w": torch.tensor([1.0, 0.0])}, sgd.init(w), sgd.lr)[0]
{'w': tensor([0.5000, 2.0000])}
"""

from torch2ort.optim._adagrad import Adagrad
from torch2ort.optim._adam import Adam, AdamW
from torch2ort.optim._lamb import Lamb
from torch2ort.optim._lion import Lion
from torch2ort.optim._optimizer import Optimizer, matcher
from torch2ort.optim._sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lamb", "Lion", "Optimizer", "matcher"]
