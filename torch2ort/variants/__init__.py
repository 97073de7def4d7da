"""The graphs of an ORTModule, and the choice of the one that serves a call."""
