"""One form for every graph: traced to pre-dispatch ATen, with casts, in-place operations and spellings resolved."""
