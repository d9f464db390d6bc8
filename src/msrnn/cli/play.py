"""`msrnn play`: a local page that shows what a bounded model keeps and forgets while it reads."""

from __future__ import annotations

import sys
import threading
import webbrowser
from argparse import Namespace
from typing import Any

from ..budgets.profile import shipped_profiles
from . import options
from .argument_parser import Commands, integer

POLICY = "tova:256"
_ABOUT = """\
Open a page in the browser and watch a transformer forget: text streams in, tokens fade as each layer drops them, and
memory stays flat while a full cache grows. The server runs on this machine and is for this machine, unless --host says
otherwise. The page loads nothing from elsewhere. Ctrl-C ends it.
"""
_MORE = """\
examples:
  msrnn play
  msrnn play --policy h2o:128 --port 8800 --no-browser
  msrnn play --model HuggingFaceTB/SmolLM2-360M-Instruct --profile profile.json
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("play", help="watch a model forget, in the browser", description=_ABOUT, epilog=_MORE)
    parser.add_argument("--policy", default=POLICY, metavar="POLICY", help=f"what the page begins with ({POLICY})")
    parser.add_argument("--profile", metavar="FILE", help="a profile to offer besides those of the package")
    parser.add_argument("--port", type=integer(0), default=8642, metavar="N", help="default: 8642; 0: any free")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="another name that browsers reach it by"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    options.add_model(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    from ..play.server import make_server, serve
    from ..play.settings import Limits, check_policy
    from ..policy import split_policy

    profiles = offered_profiles(arguments.profile)
    rules = (split_policy(arguments.policy).kind.split(",")[0],)
    check_policy(arguments.policy, Limits(), profiles, rules)
    if arguments.port > 65535:
        raise ValueError(f"--port {arguments.port} is too large; ports end at 65535")
    settings = {"host": arguments.host, "port": arguments.port, "allowed": tuple(arguments.allow_host)}
    try:
        server = make_server(
            _loader(arguments),
            model=arguments.model,
            policy=arguments.policy,
            profiles=profiles,
            rules=rules,
            **settings,
        )
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        raise ValueError(f"cannot listen on {where}: {error.strerror}; choose another --port or --host") from error
    print(f"msrnn: the playground is at {server.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    if not arguments.no_browser:
        threading.Timer(0.3, webbrowser.open, [server.url]).start()
    try:
        serve(server)
    except KeyboardInterrupt:  # the usual way to end it
        print("\nmsrnn: the playground has ended", file=sys.stderr)


def _loader(arguments: Namespace) -> Any:
    from .session import load_model

    def load(name: str | None) -> tuple[Any, Any]:
        return load_model(Namespace(**(vars(arguments) | {"model": name or arguments.model})))

    return load


def offered_profiles(path: str | None) -> tuple[str, ...]:
    """The names of the package's own profiles, and the file given."""
    return (*shipped_profiles(), *([path] if path else []))
