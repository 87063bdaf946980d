"""``python -m jax_w4a8``."""

from jax_w4a8.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
