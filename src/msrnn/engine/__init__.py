"""Batch generation on static rows, one CUDA graph a step."""
