"""Optional integrations with other libraries: each module has `register()` and `unregister()`."""
