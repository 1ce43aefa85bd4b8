"""The kernel for few queries (decoding), whose lanes are keys: `kernel` has its loops, `products` what the ways to form
its products have in common, `vectors`, `groups` and `tiles` these ways."""
