"""From a traced program to the two halves of a training step, by PyTorch's autograd."""
