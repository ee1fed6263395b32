"""Show which parameters of a model can be trained privately, and why the others cannot.

The model is built from its configuration, without its weights.

example:
  hf-private doctor path/to/model --batch 8 --length 128
"""

import argparse

from hf_private.commands.arguments import whole

NAME = "doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or its name on the Hub")
    parser.add_argument("--batch", type=whole(1), default=8, help="records in a micro-batch (default: %(default)s)")
    parser.add_argument("--length", type=whole(1), default=128, help="tokens per record (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
