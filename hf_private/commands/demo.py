"""Fine-tune a pretrained encoder privately, on invented support tickets, offline.

example:
  hf-private demo --output-dir hf_private_demo --epsilon 8
"""

import argparse

from hf_private.commands.arguments import positive, whole

NAME = "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", default="hf_private_demo", help="where everything goes (default: %(default)s)")
    parser.add_argument("--epsilon", type=positive, default=8.0, help="privacy budget (default: %(default)s)")
    parser.add_argument("--steps", type=whole(1), default=40, help="optimizer steps (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
