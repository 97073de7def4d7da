"""The subcommands of ``python -m torch2ort``, one file each."""
