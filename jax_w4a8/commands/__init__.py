"""Subcommands of ``python -m jax_w4a8``, one file each."""
