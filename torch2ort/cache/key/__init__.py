"""Dependencies of a graph: the walk over everything that forward reaches, and the key made of it."""
