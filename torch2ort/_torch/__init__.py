"""Private names of torch, by the subsystem that has them."""
