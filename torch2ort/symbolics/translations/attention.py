"""Attention is decomposed; see torch2ort.symbolics.decompositions.attention."""
