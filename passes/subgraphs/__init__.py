"""Subgraphs, each of which is fused separately: checkpointed functions, function transforms."""
