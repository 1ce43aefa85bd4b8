"""From a recognised attention to its spec, mask, further outputs, and other forms of the same call."""
