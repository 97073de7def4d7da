"""What could change a graph: the walk over all that forward reaches, and the key made of it."""
