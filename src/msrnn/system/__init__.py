"""Files, texts, sizes, downloads, memory, the console, the machine: nothing about models."""
