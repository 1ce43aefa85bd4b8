"""Kernels of approximate attention: polynomial features on AMX tiles, and the moments that bound scores beforehand."""
