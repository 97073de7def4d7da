"""Fused regions: several operators as one kernel, which torch's inductor compiles for this machine."""
