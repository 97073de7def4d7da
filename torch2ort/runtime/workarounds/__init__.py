"""Defects of onnxruntime, one file each, and what a session's graph has instead."""
