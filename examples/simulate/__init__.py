"""The schedules of `fusion.planning` as programs on a simulated two-level memory that counts every element moved.

They prove the formulas: tests hold count and formula equal. `examples/io_complexity.py` draws what they count.
"""
