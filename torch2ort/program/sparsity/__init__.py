"""Rows of a batch that a training step need not compute: padding, ignored labels, tokens that are unread.

A *row* is one position (sequence, token) of a batch. ``dependence`` finds the operators that compute each row
of their result from the same row of their arguments, and the rows that results of the program depend on.
``inspection`` counts these rows in the tensors of a call, and ``packing`` rewrites the program to compute
them alone, before autograd differentiates it.
"""
