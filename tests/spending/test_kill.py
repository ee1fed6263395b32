"""kill -9 at any instant: nothing that was released is forgotten, nothing is overspent, and training goes on.

A witness outside the package notes every private gradient that reaches an optimizer, with its noise. After each death
the ledger must account for at least that, by noise multiplier, and the accounted epsilon must stay within the budget.
"""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TARGET, STEPS, SAVE = 6.0, 6, 2
FINISHED, STATED = 0, 3  # exit codes of a child that was not killed

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hf_private.trainer.trainer"])


# ---- in the child


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_ledger(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith("ledger.jsonl")


def die_in_ledger(count: int, moment: str) -> None:
    """Die at the ledger's `count`-th line: before it, in its middle, before or after it is synced."""
    write, fsync, lines = os.write, os.fsync, 0

    def counted_write(descriptor: int, data: bytes) -> int:
        nonlocal lines
        if is_ledger(descriptor):
            lines += 1
            if lines == count and moment == "before":
                die()
            if lines == count and moment == "torn":
                write(descriptor, data[: random.randrange(1, len(data))])
                die()
        return write(descriptor, data)

    def counted_fsync(descriptor: int) -> None:
        ledger = os.path.exists(f"/proc/self/fd/{descriptor}") and is_ledger(descriptor)
        if ledger and lines == count and moment == "unsynced":
            die()
        fsync(descriptor)
        if ledger and lines == count and moment == "synced":
            die()

    os.write, os.fsync = counted_write, counted_fsync


def die_in_checkpoint(count: int, moment: str) -> None:
    """Die while a checkpoint's weights, optimizer or state are being written."""
    import torch
    from transformers import TrainerState

    from hf_private.trainer import publishing

    module, name = {
        "optimizer": (torch, "save"),
        "state": (TrainerState, "save_to_json"),
        "card": (publishing, "write_card"),
    }[moment]
    original, calls = getattr(module, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < count:
            return original(*args, **kwargs)
        if moment != "card":
            Path(args[1]).write_bytes(b'{"half": ')
        die()

    setattr(module, name, dying)


INSTANTS: dict[str, tuple[Callable[[int, str], None], int]] = {  # moment -> (how to die, largest count)
    **dict.fromkeys(("before", "torn", "unsynced", "synced"), (die_in_ledger, 2 + STEPS)),
    **{"optimizer": (die_in_checkpoint, 6), "state": (die_in_checkpoint, 2), "card": (die_in_checkpoint, 2)},
}


def child(folder: str, instant: tuple[str, int] | None, started: Any) -> None:
    """Train, or go on with training, until the end or until death at the instant."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    from hf_private.accounting.budget import BudgetExceeded
    from tests.support import training

    class Witness(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started.set()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if made._mechanism is not None:  # a complete run was resumed: nothing is released
                with open(f"{folder}.witness", "a") as file:
                    file.write(f"{made._mechanism.noise_multiplier!r}\n")
            time.sleep(0.02)  # so that a kill from outside also hits between release and update

    from hf_private.trainer import publishing

    # a card's accountants take seconds, and are tested elsewhere
    publishing.write_card = lambda folder, facts: Path(folder, "privacy.json").write_text(str(len(facts)))
    if instant is not None:
        how, _ = INSTANTS[instant[0]]
        how(instant[1], instant[0])
    made = training.trainer(
        folder,
        dp={"noise_multiplier": None, "target_epsilon": TARGET},
        callbacks=[Witness()],
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE,
    )
    try:
        resume = any(Path(folder).glob("checkpoint-*/trainer_state.json"))
        try:
            output = made.train(resume_from_checkpoint=resume)
        except ValueError as error:  # the only checkpoint is half written
            if "no complete checkpoint" not in str(error):
                raise
            output = made.train()
    except BudgetExceeded as error:
        os._exit(STATED if "raise `target_epsilon`" in str(error) else 1)
    os._exit(FINISHED if output.global_step == STEPS else 1)


# ---- in the test


def live(folder: Path, instant: tuple[str, int | float] | None) -> int:
    """Let a child run; returns its exit code, negative if it was killed."""
    started = CONTEXT.Event()
    from_outside = instant is not None and instant[0] == "time"
    process = CONTEXT.Process(target=child, args=(str(folder), None if from_outside else instant, started))
    process.start()
    if from_outside:
        started.wait(60)
        process.join(instant[1])
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def check(folder: Path, before: float, said: str) -> float:
    """The ledger is whole, covers all that was released, and keeps to the budget; returns epsilon."""
    from hf_private.spending.ledger import PrivacyLedger
    from hf_private.spending.spending import LEDGER, Spending

    if not (folder / LEDGER).is_file():
        return before
    witness = Path(f"{folder}.witness")
    released = Counter(witness.read_text().split() if witness.exists() else ())
    charged = Counter()
    for event in PrivacyLedger.read(folder / LEDGER).events:
        charged[repr(event.noise_multiplier)] += event.steps
    assert released <= charged, f"{said}: released {released}, charged {charged}"
    epsilon = Spending(folder, 1e-5, accountant="rdp").epsilon()
    assert before <= epsilon <= TARGET, said
    return epsilon


def history(folder: Path, instants: list[tuple[str, int | float]]) -> None:
    """One run that dies at each of the instants in turn, and is then left to finish."""
    epsilon, deaths = 0.0, 0
    for instant in instants:
        code = live(folder, instant)
        assert code in (FINISHED, STATED, -signal.SIGKILL), f"{instant}: exit code {code}"
        deaths += code == -signal.SIGKILL
        epsilon = check(folder, epsilon, f"{instants} at {instant}")
        if code in (FINISHED, STATED):
            break
    assert deaths
    code = live(folder, None)
    assert code in (FINISHED, STATED), f"{instants}: exit code {code}"
    assert 0 < check(folder, epsilon, f"{instants} at the end") <= TARGET
    if code == FINISHED:
        from transformers import AutoModelForSequenceClassification

        loaded = AutoModelForSequenceClassification.from_pretrained(folder / f"checkpoint-{STEPS}")
        assert all(bool(p.isfinite().all()) for p in loaded.parameters())
    assert not list(folder.rglob("*.part")), "no draft is left behind"


def draw(rng: random.Random, moment: str) -> tuple[str, int | float]:
    if moment == "time":
        return moment, rng.uniform(0.0, 1.5)
    return moment, rng.randint(1, INSTANTS[moment][1])


def test_spending_survives_five_kills(tmp_path: Path) -> None:
    """In the middle of a ledger line, right after a charge, twice in a checkpoint, and at any time at all."""
    rng = random.Random()
    history(tmp_path / "run", [draw(rng, moment) for moment in ("torn", "synced", "state", "optimizer", "time")])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_spending_survives_twenty_kills(tmp_path: Path, seed: int) -> None:
    rng = random.Random()
    moments = rng.sample([*INSTANTS, "time", "time"], 4)
    history(tmp_path / "run", [draw(rng, moment) for moment in moments])


def test_the_witness_sees_a_release_that_was_not_charged(tmp_path: Path) -> None:
    """The control: had a step been released without a charge, the check would say so."""
    folder = tmp_path / "run"
    assert live(folder, None) == FINISHED
    check(folder, 0.0, "as it is")
    noise = Path(f"{folder}.witness").read_text().split()[0]
    with open(f"{folder}.witness", "a") as file:
        file.write(f"{noise}\n")
    with pytest.raises(AssertionError, match="released"):
        check(folder, 0.0, "with one more release")
