"""Portable graphs: a call of a Function is a node named after the Function, with its body in the file.

traced sites ─ probe ─► forward has one body ─ body ─► operators of ONNX ─ comparison ─► equal to forward
─ portable_graph ─► nodes and local functions; Functions of weights only ─ weight_functions ─► weights
"""
