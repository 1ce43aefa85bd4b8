"""Changes of a normalized graph that compute the same with less, or bring an attention to light."""
