"""Symbolic I/O cost model: schedules, lower bounds, the best tile, predicted time.

The modules that use sympy are imported where they are needed, so that `import fusion` stays light.
"""
