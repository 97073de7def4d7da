"""Sessions over tensors on a GPU: their device, their stream and their outputs."""
