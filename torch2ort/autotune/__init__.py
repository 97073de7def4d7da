"""The fastest way to compute each operator, measured on this machine."""
