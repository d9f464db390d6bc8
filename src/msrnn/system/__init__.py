"""Files, sizes, downloads, memory, the machine: nothing about models."""
