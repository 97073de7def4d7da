"""PythonOp as a custom operator of any onnxruntime."""
