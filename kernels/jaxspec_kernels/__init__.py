"""Kernels of jaxspec, each behind one function that chooses an implementation. Imports nothing from jaxspec."""
