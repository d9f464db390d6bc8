"""Research policies, one file each: `score(view)` says what every token is worth. See `core/rules.py`."""
