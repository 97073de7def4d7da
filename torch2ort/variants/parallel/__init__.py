"""Models whose weights DeepSpeed or FSDP partitions among processes."""
