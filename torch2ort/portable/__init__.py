"""Portable graphs: a call of a Function is a node of the Function's name, with its body in the file.

traced sites ─ probe ─► forward has one body ─ body ─► operators of ONNX ─ comparison ─► equal to forward
─ portable_graph ─► nodes and local functions; Functions of weights alone ─ weight_functions ─► weights
"""
