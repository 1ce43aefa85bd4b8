"""Kernels of approximate attention: polynomial features on AMX tiles, the exact kernel with tiles left out, and what
bounds scores beforehand."""
