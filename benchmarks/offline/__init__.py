"""Triton's kernels compiled for GPUs that are not there, and what their machine code says without running it.

`absent` launches as a user's call does, `facts` compiles ahead of time; `disassembly` and `static_facts` read the
result, and `timeline` predicts its speed from the instructions.
"""
