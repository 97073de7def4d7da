"""The engine over the gradient builder of onnxruntime-training 1.19.2."""
