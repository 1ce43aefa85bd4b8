"""Graphs inside of the graph, each of which is fused by itself: checkpointed functions, function transforms."""
