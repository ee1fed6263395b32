"""The command line: help with examples, and one-line errors that name the option, what was got and what is allowed."""

import json
import subprocess
import sys

import pytest

from hf_private import __version__
from hf_private.accounting import ACCOUNTANT_NAMES, LAWS
from hf_private.accounting.accountants import ACCOUNTANTS
from hf_private.accounting.composition import SHAPES
from hf_private.cli import calibrate
from hf_private.cli.main import COMMANDS, build_parser, main

PLAN = ["--n", "1000", "--batch", "100", "--steps", "20", "--epsilon", "3", "--delta", "1e-5"]


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Run a command that must be refused, and return its one line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.count("\n") == 1, f"not one line: {err}"
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", [None, *(command.NAME for command in COMMANDS)])
def test_help_has_an_example(command: str | None, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"] if command else ["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    example = out.partition("example")[2]
    assert f"  hf-private {command or ''}".rstrip() in example


@pytest.mark.parametrize("attack", ["mia", "canaries", "step"])
def test_help_of_an_attack_has_an_example_that_is_understood(attack: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["audit", attack, "--help"])
    example = capsys.readouterr().out.strip().splitlines()[-1]
    assert build_parser().parse_args(example.split()[1:]).attack == attack


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.NAME)
def test_examples_are_understood(command) -> None:
    lines = [line.strip() for line in command.__doc__.splitlines() if line.strip().startswith("hf-private ")]
    assert lines
    for line in lines:
        assert build_parser().parse_args(line.split()[1:]).run is command.run


WRONG = [  # (arguments, the option that is named, what is allowed); what was got is the last argument
    (["calibrate", "--n", "x"], "--n", "a whole number >= 1"),
    (["calibrate", "--n", "2.5"], "--n", "a whole number >= 1"),
    (["calibrate", "--batch", "0"], "--batch", "a whole number >= 1"),
    (["calibrate", "--epochs", "-1"], "--epochs", "a number > 0"),
    (["calibrate", "--epochs", "inf"], "--epochs", "a number > 0"),
    (["calibrate", "--steps", "0"], "--steps", "a whole number >= 1"),
    (["calibrate", "--epsilon", "0"], "--epsilon", "a number > 0"),
    (["calibrate", "--epsilon", "nan"], "--epsilon", "a number > 0"),
    (["calibrate", "--advantage", "0"], "--advantage", "a number between 0 and 1"),
    (["calibrate", "--advantage", "1"], "--advantage", "a number between 0 and 1"),
    (["calibrate", "--delta", "1"], "--delta", "a number between 0 and 1"),
    (["calibrate", "--accountant", "gdp"], "--accountant", "'prv', 'pld', 'rdp'"),
    (["calibrate", "--records-per-unit", "0"], "--records-per-unit", "a whole number >= 1"),
    (["calibrate", "--unit-counts", "nowhere.txt"], "--unit-counts", "a file that can be read"),
    (["plan", "--unit-counts", "nowhere.txt"], "--unit-counts", "a file that can be read"),
    (
        ["calibrate", "--n", "10", "--steps", "1", "--epsilon", "1", "--delta", ".1", "--batch", "20"],
        "--batch",
        "--n = 10",
    ),
    (["demo", "--epsilon", "0"], "--epsilon", "a number > 0"),
    (["demo", "--steps", "none"], "--steps", "a whole number >= 1"),
    (["doctor", "model", "--batch", "0"], "--batch", "a whole number >= 1"),
    (["doctor", "model", "--records-per-unit", "0"], "--records-per-unit", "a whole number >= 1"),
    (["doctor", "model", "--length", "-3"], "--length", "a whole number >= 1"),
    (["doctor", "model", "--task", "poetry"], "--task", "'sequence-classification'"),
    (["doctor", "--device", "poetry"], "--device", "one of cpu, cuda"),
    (["doctor", "model", "--carriers", "q=8"], "--carriers", "KEY=VALUE with a key of r, sparsity"),
    (["doctor", "model", "--bits", "5"], "--bits", "4, 8"),
    (["doctor", "model", "--memory", "0"], "--memory", "a number > 0"),
    (["plan", "--n", "1"], "--n", "a whole number >= 2"),
    (["plan", "--epsilon", "0"], "--epsilon", "a number > 0"),
    (["plan", "--delta", "1"], "--delta", "a number between 0 and 1"),
    (["plan", "--hours", "0"], "--hours", "a number > 0"),
    (["plan", "--task", "poetry"], "--task", "'sequence-classification'"),
    (["plan", "--length", "0"], "--length", "a whole number >= 1"),
    (["plan", "--micro-batch", "0"], "--micro-batch", "a whole number >= 1"),
    (["plan", "--n", "10", "--epsilon", "1", "--model", "./nowhere"], "--model", "a folder with a config.json"),
    (["card", "model", "--tuning-runs", "0"], "--tuning-runs", "a whole number >= 1"),
    (["card", "model", "--law", "uniform"], "--law", "'fixed', 'geometric', 'logarithmic'"),
    (["card", "nowhere"], "PATH", "privacy.json"),
    (["compose", "a", "--delta", "1"], "--delta", "a number between 0 and 1"),
    (["verify", "model", "--time-limit", "0"], "--time-limit", "a number > 0"),
    (["report", "model", "--format", "poetry"], "--format", "'md', 'registry', 'cyclonedx'"),
    (["frobnicate"], "COMMAND", "'demo', 'calibrate', 'doctor'"),
]


@pytest.mark.parametrize(("arguments", "option", "allowed"), WRONG, ids=[" ".join(a) for a, _, _ in WRONG])
def test_wrong_value(arguments: list[str], option: str, allowed: str, capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, *arguments)
    assert option in line
    assert arguments[-1] in line
    assert allowed in line


def test_every_option_with_a_value_has_a_wrong_value_above() -> None:
    seen = {(arguments[0], option) for arguments, option, _ in WRONG}
    free_text = {("demo", "--output-dir"), ("verify", "--revision"), ("report", "--html"), ("report", "--also")}
    free_text |= {("plan", "--picture")}
    for command in COMMANDS:
        subparser = build_parser().parse_args([command.NAME, *_required(command)]).parser
        for action in subparser._actions:
            if action.option_strings and action.nargs != 0:
                assert (command.NAME, action.option_strings[-1]) in seen | free_text


def _required(command) -> list[str]:
    line = next(line for line in command.__doc__.splitlines() if line.strip().startswith("hf-private "))
    return line.split()[2:]


def test_choices_are_the_ones_that_the_library_knows() -> None:
    assert tuple(ACCOUNTANTS) == ACCOUNTANT_NAMES
    assert LAWS == ("fixed", *SHAPES)


def test_missing_and_unknown_options_are_named(capsys: pytest.CaptureFixture) -> None:
    assert "--epsilon" in refused(capsys, "calibrate", "--n", "10", "--batch", "1", "--steps", "1", "--delta", "0.1")
    assert "--epochs --steps" in refused(
        capsys, "calibrate", "--n", "10", "--batch", "1", "--epsilon", "1", "--delta", "0.1"
    )
    assert "--epsilom" in refused(capsys, "demo", "--epsilom", "3")
    assert "--eps" in refused(capsys, "demo", "--eps", "3")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    assert "calibrate" in capsys.readouterr().out


def test_console_script_runs_as_a_program() -> None:
    run = subprocess.run([sys.executable, "-m", "hf_private.cli", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, f"hf-private {__version__}")


def test_calibrate_golden_value(capsys: pytest.CaptureFixture) -> None:
    arguments = "calibrate --n 67349 --batch 2000 --steps 680 --epsilon 3.3 --delta 1e-5 --json"
    assert main(arguments.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["noise_multiplier"] == pytest.approx(1.2538, abs=1e-3)
    assert 3.25 < report["epsilon"] <= 3.3


def test_calibrate_neighbours(capsys: pytest.CaptureFixture) -> None:
    assert main(["calibrate", *PLAN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    epsilon = {row["plan"]: row["epsilon"] for row in report["neighbours"]}
    assert epsilon["half the epochs"] < report["epsilon"] <= 3 < epsilon["twice the epochs"]
    assert main(["calibrate", *PLAN]) == 0
    text = capsys.readouterr().out
    assert "noise multiplier" in text
    assert all(row["plan"] in text for row in report["neighbours"])


def test_calibrate_protects_people_with_several_records(capsys: pytest.CaptureFixture) -> None:
    sigmas = []
    for extra in ([], ["--records-per-unit", "2"]):
        assert main(["calibrate", *PLAN, "--json", *extra]) == 0
        sigmas.append(json.loads(capsys.readouterr().out)["noise_multiplier"])
    assert sigmas[1] > 1.5 * sigmas[0]


def test_calibrate_counts_epochs_as_the_sampler_does() -> None:
    """An epoch has ceil(n / batch) steps; a batch larger than the data is not offered as a neighbour."""
    plan = calibrate.Plan("as asked", n=1000, batch=600, steps=4)
    assert plan.epochs == pytest.approx(2.4)
    assert all(neighbour.batch <= 1000 for neighbour in plan.neighbours())
    assert len(plan.neighbours()) == 3


def test_weak_delta_is_warned_about(capsys: pytest.CaptureFixture) -> None:
    assert main(["calibrate", *PLAN[:-1], "1e-3", "--json"]) == 0
    assert "1 / n" in capsys.readouterr().err
