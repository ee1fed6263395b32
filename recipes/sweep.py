"""Fill a table, methods x epsilon x seeds, with runs of a recipe. Stop it at any time; the next start continues.

    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml              # runs what is missing
    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml --dry_run    # prints the missing commands
    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml --methods rgp lsg &  # one part per core

The sweep first searches the learning rate: every method gets the same number of short runs, evaluated on held-out
training records, with the noise of the full run. Then it fills the table with the best rate of each method. After
every cell it rewrites <results>.json, <results>.md (mean and standard deviation over seeds) and <results>.png (score
over epsilon). Cells in <results>.json are done, on any machine; empty the file to run them again.

An interrupted cell continues from its last checkpoint, if `settings` in the file saves any; lost steps are charged, so
it ends with slightly more noise. Without a checkpoint the cell starts again, and its folder is emptied, ledger
included. This is right for research on public data. On private data every run counts, including those of the search:
add them up with `hf-private compose`.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from table import markdown, plot, samples, shown_samples, summary

HERE = Path(__file__).parent


@dataclass
class Cell:
    """One run of the recipe; its name is the name of its folder."""

    name: str
    method: str
    settings: dict[str, Any]
    epsilon: float | None = None
    seed: int = 0
    result: dict[str, Any] | None = field(default=None, repr=False)


class Sweep:
    """The cells of a sweep file, and their results."""

    def __init__(self, path: str) -> None:
        self.plan = yaml.safe_load(Path(path).read_text())
        missing = {"title", "recipe", "config", "metrics", "runs", "results", "table"} - self.plan.keys()
        if missing:
            raise SystemExit(f"{path} must have a key `{min(missing)}`. See recipes/configs/sweep_digits.yaml.")
        self.plan["command"] = f"python recipes/sweep.py --config {path}"
        self.base = yaml.safe_load(Path(self.plan["config"]).read_text())
        self.runs = Path(self.plan["runs"])
        self.results = Path(self.plan["results"])
        self.metrics: list[str] = self.plan["metrics"]  # the first one selects learning rates
        self.methods = list(dict.fromkeys(method for row in self.plan["table"] for method in row["methods"]))
        self.best = {"max": max, "min": min}[self.plan.get("choose", "max")]

    def known(self) -> dict[str, dict[str, Any]]:
        """Cells of <results>.json by name, run on this or another machine."""
        file = self.results.with_suffix(".json")
        content = json.loads(file.read_text() or "{}") if file.is_file() else {}
        return {cell["name"]: cell for part in ("tuning", "cells") for cell in content.get(part, [])}

    def tuning(self) -> list[Cell]:
        """Short runs, one per method and learning rate."""
        tune = self.plan.get("tune")
        if not tune:
            return []
        rates = {method: tune["by_method"].get(method, tune["learning_rates"]) for method in self.methods}
        return [
            Cell(f"tune_{method}_{rate:g}", method, tune["settings"] | {"learning_rate": rate})
            for method in self.methods
            for rate in map(float, rates[method])
        ]

    def table(self, tuned: list[Cell]) -> list[Cell]:
        """The cells of the table, each with the best learning rate of its method."""
        rates = {method: cell.settings["learning_rate"] for method, cell in self.chosen(tuned).items()}
        cells = []
        for row in self.plan["table"]:
            for method, epsilon, seed in itertools.product(row["methods"], row["epsilons"], row["seeds"]):
                budget = {} if epsilon is None else {"target_epsilon": float(epsilon)}
                rate = {"learning_rate": rates[method]} if method in rates else {}
                name = f"{method}_eps{epsilon:g}_seed{seed}" if epsilon else f"{method}_seed{seed}"
                cells.append(Cell(name, method, budget | rate | {"seed": seed}, epsilon, seed))
        return cells

    def chosen(self, tuned: list[Cell]) -> dict[str, Cell]:
        """The best finished short run of each method."""
        by_method: dict[str, list[Cell]] = {}
        for cell in tuned:
            if cell.result:
                by_method.setdefault(cell.method, []).append(cell)
        return {method: self.best(cells, key=self.score) for method, cells in by_method.items()}

    def score(self, cell: Cell) -> float:
        return cell.result["metrics"][self.metrics[0]]

    def load(self, cells: list[Cell]) -> list[Cell]:
        """Load the results of finished cells; return the others."""
        known = self.known()
        for cell in cells:
            folder, asked = self.runs / cell.name, self.asked(cell)
            if (folder / "results.json").is_file() and _read(folder / "cell.json") == asked:
                cell.result = _read(folder / "results.json") | {"samples": samples(folder)}
            elif known.get(cell.name, {}).get("asked") == asked:
                cell.result = {key: value for key, value in known[cell.name].items() if key not in ("name", "asked")}
        return [cell for cell in cells if cell.result is None]

    def settings(self, cell: Cell) -> dict[str, Any]:
        """The settings of the recipe, without its output folder."""
        return {"config": self.plan["config"], **self.plan.get("settings", {}), **cell.settings, "method": cell.method}

    def asked(self, cell: Cell) -> dict[str, Any]:
        """The settings of a cell, and a hash of the rest of its file; with other settings it is not done."""
        settings = self.settings(cell)
        own = self.base.get("by_method", {}).get(cell.method) or {}
        files = [
            {k: v for k, v in part.items() if k not in settings} for part in (self.base | {"by_method": None}, own)
        ]
        content = json.dumps(files, sort_keys=True)
        return {"config_sha256": hashlib.sha256(content.encode()).hexdigest()[:16], **settings}

    def command(self, cell: Cell) -> list[str]:
        settings = self.settings(cell) | {"output_dir": str(self.runs / cell.name)}
        flags = [
            (f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value))
            for name, value in settings.items()
        ]
        return [sys.executable, str(HERE / self.plan["recipe"]), *itertools.chain(*flags)]

    def prepared(self, cell: Cell) -> list[str]:
        """Make the folder of a cell, or find its checkpoint there; return the options that resume it."""
        folder, asked = self.runs / cell.name, self.asked(cell)
        if folder.exists():
            if not (folder / "cell.json").is_file():
                raise FileExistsError(f"{folder} was not made by this sweep. Choose another `runs` folder.")
            if _read(folder / "cell.json") == asked and any(folder.glob("checkpoint-*")):
                return ["--resume_from_checkpoint", "True"]
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / "cell.json").write_text(json.dumps(asked, indent=2) + "\n")
        return []

    def run(self, cell: Cell, progress: str) -> bool:
        """Run one cell in a separate process; its output goes to log.txt in its folder."""
        folder, resume = self.runs / cell.name, self.prepared(cell)
        print(f"[{progress}] {cell.name} {'(resumed) ' if resume else ''}...", end=" ", flush=True)
        start = time.perf_counter()
        with open(folder / "log.txt", "a") as log:
            command = self.command(cell) + resume
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        took = (time.perf_counter() - start) / 60
        self.load([cell])
        if cell.result and not self.plan.get("keep_models", False):  # keeps the scores and the privacy statement
            for weights in folder.glob("*.safetensors"):
                weights.unlink()
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        if code or cell.result is None:
            print(f"FAILED, see {folder / 'log.txt'}")
            return False
        print(f"{self.metrics[0]} {self.score(cell):.4f} in {took:.1f} min")
        return True

    def write(self) -> None:
        """Write the results so far as JSON, Markdown and a plot, including those of parallel sweeps."""
        tuned = self.tuning()
        self.load(tuned)
        table = self.table(tuned)
        self.load(table)
        rows = summary([cell for cell in table if cell.result], self.metrics)
        chosen = {method: cell.settings["learning_rate"] for method, cell in self.chosen(tuned).items()}
        trials = [(c.method, c.settings["learning_rate"], self.score(c)) for c in tuned if c.result]
        self.results.parent.mkdir(parents=True, exist_ok=True)
        done = [
            [{"name": c.name, "asked": self.asked(c), **c.result} for c in part if c.result] for part in (tuned, table)
        ]
        content = {"rows": rows, "learning_rates": chosen, "tuning": done[0], "cells": done[1]}
        part = self.results.with_name(f".{self.results.name}.{os.getpid()}")  # a parallel sweep may be reading
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(self.results.with_suffix(".json"))
        texts = shown_samples([c for c in table if c.result and c.seed == table[0].seed])
        beside = Path(self.plan.get("beside", ""))  # results of another script that belong to this table
        texts += f"\n{beside.read_text().replace('# ', '## ', 1)}" if beside.is_file() else ""
        self.results.with_suffix(".md").write_text(markdown(self.plan, rows, trials, len(table)) + texts)
        if rows:
            plot(self.plan, rows, self.results.with_suffix(".png"))


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of the sweep")
    parser.add_argument("--dry_run", action="store_true", help="only print the missing commands")
    parser.add_argument("--methods", nargs="+", help="run only these; another sweep may run others in parallel")
    options = parser.parse_args(argv)
    sweep, failed = Sweep(options.config), []
    tuned = sweep.tuning()
    methods = options.methods or sweep.methods
    unknown = sorted(set(methods) - set(sweep.methods))
    if unknown:
        parser.error(f"--methods must be in the table ({', '.join(sweep.methods)}), got {', '.join(unknown)}")
    for stage in ("tuning", "table"):
        cells = [cell for cell in (tuned if stage == "tuning" else sweep.table(tuned)) if cell.method in methods]
        missing = sweep.load(cells)
        print(f"{stage}: {len(cells) - len(missing)} of {len(cells)} runs are done.")
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            if options.dry_run:
                print(" ", " ".join(sweep.command(cell)))
                continue
            if not sweep.run(cell, f"{stage} {number}/{len(cells)}"):
                failed.append(cell.name)
            sweep.write()
    if not options.dry_run:
        sweep.write()
        print(f"{sweep.results.with_suffix('.md')}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
