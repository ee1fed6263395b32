"""The subcommands of `hf-private`, one module each.

A command is a module with `NAME`, `add_arguments(parser)` and `run(args) -> exit code`; its docstring is its help text
and ends with an example. Heavy imports belong into `run`, so that `--help` answers at once. To add a command, list its
module in `COMMANDS`.
"""

from types import ModuleType

from hf_private.commands import audit, calibrate, card, compose, demo, doctor, verify

COMMANDS: tuple[ModuleType, ...] = (demo, calibrate, doctor, verify, card, compose, audit)
