"""Backends of the expert call, one file each."""
