"""Cases of `benchmarks/kernels.py`, one function for each operation."""
