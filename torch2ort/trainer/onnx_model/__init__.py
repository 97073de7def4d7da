"""Conversion of an ONNX model to a module of PyTorch, which is trained like any other."""
