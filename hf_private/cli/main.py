"""The console script `hf-private`.

A command is a module with `NAME`, `add_arguments(parser)` and `run(args) -> exit code`; its docstring is its help text
and ends with an example. Heavy imports belong into `run`, so that `--help` answers at once. To add a command, list its
module in `COMMANDS`.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from hf_private import __version__

from . import audit, calibrate, card, compose, verify
from .arguments import UsageError
from .demo import command as demo
from .doctor import command as doctor
from .plan import command as plan

COMMANDS: tuple[ModuleType, ...] = (demo, calibrate, doctor, plan, verify, card, compose, audit)
EXAMPLE = """\
examples:
  hf-private demo
  hf-private calibrate --n 67349 --batch 1024 --epochs 3 --epsilon 8 --delta 1e-5
  hf-private doctor path/to/model
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the option, what was got, what is allowed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    common.add_argument("--verbose", action="store_true", help="show logs and warnings of the libraries underneath")
    return common


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `hf-private` with one subparser per module in `COMMANDS`."""
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser("hf-private", description="Private fine-tuning that can be checked.", epilog=EXAMPLE, **layout)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        summary, _, rest = command.__doc__.partition("\n")
        subparser = subparsers.add_parser(
            command.NAME, help=summary.rstrip("."), description=summary, epilog=rest.strip("\n"),
            parents=[_common_options()], **layout,
        )  # fmt: skip
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _quieten() -> None:
    """Silence the libraries underneath, before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a request that makes no sense, otherwise the command's own."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if "run" not in args:
        parser.print_help()
        return 0
    if not args.verbose:
        _quieten()
    try:
        return args.run(args)
    except UsageError as error:
        args.parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
