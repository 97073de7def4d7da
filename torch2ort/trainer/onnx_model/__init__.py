"""An ONNX model as a module of PyTorch, so that it is trained like any other."""
