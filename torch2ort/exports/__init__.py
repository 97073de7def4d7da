"""One export: a model's call becomes a graph, traced and translated, or out of the export cache."""
