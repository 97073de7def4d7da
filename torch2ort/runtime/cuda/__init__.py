"""Sessions over tensors that are on a GPU: their device, their stream and their outputs."""
