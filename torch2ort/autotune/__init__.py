"""The fastest way to compute each operator, by measurement on this machine."""
