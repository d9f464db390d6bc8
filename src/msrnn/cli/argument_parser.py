"""The argument parser of all commands, and the types of numbers it takes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..system.sizes import parse_bytes


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, errors of one line, and epilogs printed as they are written."""

    def __init__(self, *args: object, **settings: object) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **(defaults | settings))  # type: ignore[arg-type]
        self.register("type", None, _filled)  # of arguments without a type; type=str may be empty

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if settings.get("nargs") == argparse.REMAINDER:  # of another program, which may allow what we do not
            settings.setdefault("type", str)
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        print(f"msrnn: error: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]  # the only name argparse has for it
else:
    Commands = argparse._SubParsersAction


def _filled(text: str) -> str:
    """A text that says something: an unset variable of the shell leaves nothing."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give a value, or leave it out")
    return text


def size(text: str) -> int:
    """The type of an option that takes a number of bytes: 16GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def integer(low: int) -> Callable[[str], int]:
    """The type of an option that takes an integer of at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least {low}")
        return value

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a number from `low` (or `above` it) to `high`."""
    span = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {span}")
        return value

    return parse
