"""Chooses by measurement who does an operator of a half, and in which layout."""
