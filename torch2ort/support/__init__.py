"""Paths, warnings and timings that every room uses."""
