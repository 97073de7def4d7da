"""PyTorch's own kernels as sites: their operators, derivatives, and the calls that a file may make."""
