"""Benchmarks: `python -m benchmarks.<folder>.<name>` in a checkout. benchmarks/README.md lists them."""
