"""A whole training step as ONNX: forward, backward and optimizer in one graph, for any ONNX Runtime."""
