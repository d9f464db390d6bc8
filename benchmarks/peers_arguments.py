"""The command line of every worker of benchmarks/peers.py."""

import argparse
from pathlib import Path


def arguments(runs):
    parser = argparse.ArgumentParser(description="Do jobs for benchmarks/peers.py.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=sorted(runs), required=True)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deadline", type=float, required=True, help="start no job after this time (time.time())")
    return parser.parse_args()
