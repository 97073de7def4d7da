"""Regions of operators that torch's inductor compiles to one function."""
