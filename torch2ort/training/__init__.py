"""The engine: training steps of a graph in sessions of ONNX Runtime."""
