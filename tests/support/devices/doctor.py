"""Run by tests/devices in a process of its own: `hf-private doctor --device emu`; the emulation counts waits."""

import sys
from unittest import mock

from hf_private.cli.doctor import acceptance
from hf_private.cli.main import main
from tests.support.devices import emulated


def waits_in(step, device):
    with emulated.counted() as counts:
        step()
    return counts.syncs.total()


if __name__ == "__main__":
    library = emulated.register()
    with mock.patch.object(acceptance, "waits_in", waits_in), mock.patch.object(acceptance, "ROUNDS", 1):
        code = main(["doctor", "--device", "emu", *sys.argv[1:]])
    del library
    emulated.leave(code)
