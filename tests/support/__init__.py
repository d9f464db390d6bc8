"""What several test files share: tiny models, an oracle, made-up records, kernels in the interpreter."""
