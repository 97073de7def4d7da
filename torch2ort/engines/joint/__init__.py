"""Forward and backward graphs of one joint trace, on any onnxruntime."""
