"""Doors of other libraries, opened when asked for: each module has `register()` and `unregister()`."""
