"""`python -m msrnn` is `msrnn`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
