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
from typing import Any, NoReturn

from hf_private import __version__

from . import audit, calibrate, card, compose, report, verify
from .arguments import UsageError, add_common_options
from .demo import command as demo
from .doctor import command as doctor
from .plan import command as plan

COMMANDS: tuple[ModuleType, ...] = (demo, calibrate, doctor, plan, verify, report, card, compose, audit)
EXAMPLE = """\
examples:
  hf-private demo
  hf-private calibrate --n 67349 --batch 1024 --epochs 3 --epsilon 8 --delta 1e-5
  hf-private doctor path/to/model
"""
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the option, what was got, what is allowed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, formatter_class=layout, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `hf-private` with one subparser per module in `COMMANDS`."""
    parser = _Parser("hf-private", description="Private fine-tuning with checkable claims.", epilog=EXAMPLE)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        summary, _, rest = (command.__doc__ or "").partition("\n")
        subparser = subparsers.add_parser(
            command.NAME, help=summary.rstrip("."), description=summary, epilog=rest.strip("\n")
        )
        add_common_options(subparser)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _silence_libraries() -> None:
    """Silence the libraries underneath; call it before they are imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong request exits with 2."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if "run" not in args:
        parser.print_help()
        return 0
    if not args.verbose:
        _silence_libraries()
    command_parser: argparse.ArgumentParser = args.parser
    try:
        return args.run(args)
    except UsageError as error:
        command_parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
