"""fusion: an attention compiler for unmodified PyTorch models."""
