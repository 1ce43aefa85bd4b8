"""From a recognised attention to its spec, mask, auxiliary outputs, and other forms of the same call."""
