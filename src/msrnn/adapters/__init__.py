"""One leaf per framework: each speaks its framework's language above and the recurrence's below."""
