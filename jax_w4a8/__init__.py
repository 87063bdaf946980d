"""W4A8 mixture-of-experts layers for JAX on CPUs."""
