"""Changes of a normalized graph that compute the same function with less work, or make an attention recognisable."""
