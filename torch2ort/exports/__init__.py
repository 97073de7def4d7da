"""One export: a model's call becomes a graph, traced and translated, or read from the export cache."""
