"""Passes over a traced program, before it is differentiated or translated."""
