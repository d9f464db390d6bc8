"""The hot operations compiled for the CPU by Numba."""
