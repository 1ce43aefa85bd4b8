"""Triton's kernels compiled for GPUs that are not there, and facts of their machine code.

`absent` launches as a user's call does, `facts` compiles ahead of time; `disassembly` reads the result.
"""
