"""PyTorch's own kernels as sites: which there are, their derivatives, and the calls that a file may make."""
