"""Attack private runs with canaries, and compare the rates with the bounds on the model card.

Canaries are records that each move one number of their own, as far as clipping permits (hf_private/audit/canaries.py).
The attacker sees every noised sum and calls a canary a member if the likelihood ratio of its sums is large: the best
test that there is, so that the rates come close to the bounds. Thresholds are fixed before a run, by simulation. A
bound is refuted if the rates contradict it beyond chance: Clopper-Pearson limits, with an error of 5 % for all
comparisons together.

    python recipes/attack_rates.py                # 20 runs, a few minutes; stop it at any time, it goes on

Writes recipes/results/attack_rates.{json,md}.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hf_private import DPTrainer
from hf_private.accounting.events import Event
from hf_private.accounting.risk import FALSE_ALARMS, risk
from hf_private.audit.canaries import CanaryTrainer, audit_run, small_task
from hf_private.audit.statistics import clopper_pearson

RESULTS = Path(__file__).parent / "results"


class Setting(NamedTuple):
    """Fields of DPConfig, steps, and the share of all canaries that is used: fewer of them are sampled more often."""

    dp: dict[str, Any]
    steps: int
    share: float = 1.0


SETTINGS = {
    "60 steps, epsilon 1": Setting({"target_epsilon": 1.0}, 60),
    "60 steps, epsilon 8": Setting({"target_epsilon": 8.0}, 60),
    "5 steps, a quarter of all records in each": Setting({"target_epsilon": 8.0}, 5, 0.15),
    "30 steps, automatic clipping": Setting({"target_epsilon": 4.0, "clipping": "automatic"}, 30),
    "30 steps, RGP": Setting({"target_epsilon": 3.0, "carriers": {"r": 2, "head_scale": 1.0}}, 30),
}
ERROR = 0.05
SIMULATED = 200_000


class Watcher(CanaryTrainer):
    """Keeps the released gradients along the canaries' axes, step by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[np.ndarray] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        before = self.scores.copy()
        loss = super().training_step(*args, **kwargs)
        self.seen.append(self.scores - before)
        return loss


def likelihood_ratio(sums: np.ndarray, event: Event) -> np.ndarray:
    """Log likelihood ratio of member to non-member, from sums in clip norms, (steps, canaries) -> (canaries,).

    In each step a member adds 1 with probability q, under noise of sigma.
    """
    q, sigma = event.sample_rate, event.noise_multiplier
    return np.log1p(q * np.expm1((2 * sums - 1) / (2 * sigma**2))).sum(axis=0)


def thresholds(event: Event) -> dict[str, float]:
    """At which likelihood ratio to say "member": for each rate of false alarms, and for the best advantage."""
    draw = np.random.default_rng(0)
    total = np.concatenate(
        [
            likelihood_ratio(event.noise_multiplier * draw.standard_normal((event.steps, SIMULATED // 20)), event)
            for _ in range(20)
        ]
    )
    alarms = {f"{rate:g}": float(np.quantile(total, 1 - rate)) for rate in FALSE_ALARMS}
    return {"advantage": 0.0, **alarms}  # a ratio of 1 is where the sum of both errors is smallest


def attack(name: str, canaries: int, setting: Setting) -> dict[str, Any]:
    """Train once with canaries; count members found and false alarms at every threshold, beside the run's bounds."""
    made: list[DPTrainer] = []
    canaries = round(canaries * setting.share)

    def make_trainer(trainer_class: Any, folder: str) -> DPTrainer:
        made.append(small_task(trainer_class, folder, **setting.dp))
        made[0].args.max_steps = setting.steps
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        report = audit_run(make_trainer, folder, canaries=canaries, trainer_class=Watcher)
        (trainer,) = made
        assert isinstance(trainer, Watcher)
        claimed, record = trainer.privacy_spent(), trainer.privacy_record()
    (event,) = [Event.from_dict(one) for one in record["ledger"]["events"]]
    config = trainer.dp_config
    sums = np.stack(trainer.seen) * config.expected_batch_size / config.clip_norm
    ratios = likelihood_ratio(sums, event)
    members = int(report.included.sum())
    return {
        "setting": name,
        "members": members,
        "others": canaries - members,
        "counts": {
            key: [int((ratios[report.included] > at).sum()), int((ratios[~report.included] > at).sum())]
            for key, at in thresholds(event).items()
        },
        "events": [event.to_dict()],
        "epsilon": claimed.epsilon,
        "delta": claimed.delta,
        "contradicted": report.contradicted,
    }


def compare(run: dict[str, Any], comparisons: int) -> list[dict[str, Any]]:
    """Rates of one run beside its bounds; the limits hold for all of `comparisons` together with 1 - ERROR."""
    bounds = risk([Event.from_dict(one) for one in run["events"]], run["delta"])
    confidence = 1 - ERROR / comparisons
    rows = []
    for key, (found, alarms) in run["counts"].items():
        low = clopper_pearson(found, run["members"], confidence)[0]
        high = clopper_pearson(alarms, run["others"], confidence)[1]
        row = {"at": key, "found": found / run["members"], "alarms": alarms / run["others"]}
        if key == "advantage":
            row |= {"rate": row["found"] - row["alarms"], "least": low - high, "bound": bounds.advantage}
        else:
            row |= {"rate": row["found"], "least": low, "bound": bounds.profile.found([high])[0]}
            row |= {"nominal": bounds.tpr[float(key)]}
        rows.append({**row, "refuted": row["least"] > row["bound"]})
    return rows


def table(runs: list[dict[str, Any]], canaries: int) -> str:
    """The report: for each setting the mean rates of its runs beside the bounds."""
    comparisons = sum(len(run["counts"]) for run in runs)
    compared = [(run, compare(run, comparisons)) for run in runs]
    refuted = sum(row["refuted"] for _, rows in compared for row in rows)
    lines = []
    for name in dict.fromkeys(run["setting"] for run in runs):
        group = [rows for run, rows in compared if run["setting"] == name]
        advantage, *rates = zip(*group, strict=True)
        cells = [f"{np.mean([r['rate'] for r in advantage]):.3f} of {advantage[0]['bound']:.3f}"]
        cells += [f"{np.mean([r['rate'] for r in rate]):.1%} of {rate[0]['nominal']:.1%}" for rate in rates]
        epsilon = next(run["epsilon"] for run in runs if run["setting"] == name)
        lines.append(f"| {name} | {epsilon:.2f} | {len(group)} | {' | '.join(cells)} |")
    heads = " | ".join(f"members found at {float(rate):.1%} false alarms" for rate in FALSE_ALARMS)
    return (
        "# Rates of an actual attack beside the bounds\n\n"
        f"A tiny BERT on 100 records and up to {canaries:,} canaries, each of which a fair coin puts into the training"
        " set."
        " The attacker sees every released gradient and uses the best test that there is. Each cell: mean rate of the"
        " runs, of at most what the card says.\n\n"
        "`python recipes/attack_rates.py`\n\n"
        f"| run | epsilon | runs | advantage | {heads} |\n| --- | --- | --- | --- | --- | --- | --- |\n"
        + "\n".join(lines)
        + f"\n\n{len(runs)} runs, {comparisons} comparisons: {refuted} refute a bound. A comparison does if the lower"
        " Clopper-Pearson limit of the members found lies above the bound at the upper limit of the false alarms;"
        f" the limits hold for all of them together with {1 - ERROR:.0%}. A mean may lie above its bound by chance.\n"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="of each setting")
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "attack_rates.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    for name, setting in SETTINGS.items():
        for _ in range(args.runs - sum(run["setting"] == name for run in runs)):
            runs.append(attack(name, args.canaries, setting))
            path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
            print(name, compare(runs[-1], 1), flush=True)
    text = table(runs, args.canaries)
    (args.output / "attack_rates.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
