"""The hot operations in plain PyTorch, on any device: what the compiled ones are held to."""
