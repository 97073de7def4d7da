"""Entries of the cache on disk: atomic, verified, shared by any number of processes."""
