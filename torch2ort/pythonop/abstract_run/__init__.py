"""Observation of a Function before its first real call: on fake tensors, or once on the sample's own."""
