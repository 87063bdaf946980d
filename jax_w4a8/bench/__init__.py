"""Benchmarks that report shares of the machine's own measured limits: ``python -m jax_w4a8 bench``."""
