"""From a model to a traced program: what torch.export cannot do by itself."""
