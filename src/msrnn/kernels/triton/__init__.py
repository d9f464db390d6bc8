"""The hot operations for a GPU in Triton."""
