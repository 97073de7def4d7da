"""Which graph serves a call of an ORTModule."""
