"""What the PythonOp kernels inside of onnxruntime-training ask for."""
