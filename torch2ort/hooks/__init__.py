"""Observers of a model's tensors during a run, the same in eager PyTorch and on ONNX Runtime."""

from torch2ort.hooks.statistics import StatisticsSubscriber
from torch2ort.hooks.subscriber import RunContext, SubscriberBase
from torch2ort.hooks.subscription import Subscription, subscribe

__all__ = ["RunContext", "StatisticsSubscriber", "SubscriberBase", "Subscription", "subscribe"]
