"""Capture of a model as a traced program, with support for models that torch.export alone cannot trace."""
