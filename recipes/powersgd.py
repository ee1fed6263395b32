"""DP-PowerSGD (a baseline of the RGP paper), and how to add a method: subclass `Method`, hand it to the trainer.

PowerSGD (Vogels et al. 2019) approximates the gradient G (rows, columns) of each weight by P Q^T of rank r. What one
record can change in P and Q is hard to bound, so noise has to be added to the full gradient *before* the projection.
Everything after the noise is post-processing, and the ledger charges a step of DP-SGD. RGP, which projects first, adds
r (rows + columns) numbers' worth of noise instead of rows * columns: the difference is what the paper's Table 2 shows.

    python recipes/powersgd.py                                        # a tiny model on made-up records, in seconds
    python recipes/powersgd.py --r 4 --noise_multiplier 1.0 --steps 50
"""

import argparse
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_private.config import DPConfig
from hf_private.gradients.method import Method
from hf_private.trainer.trainer import DPTrainer


class PowerSGD(Method):
    """DP-SGD whose noised gradients of matrices are replaced by their rank-r approximation.

    The blocks (what is clipped and noised) are the base class's, one for each parameter; only what happens to them
    after the noise changes. Each step starts from the last step's Q, so that one power iteration is enough.
    """

    def __init__(self, r: int) -> None:
        self.r = r
        self.right: dict[str, Tensor] = {}  # Q (columns, r) by parameter name

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        generator = torch.Generator().manual_seed(0)  # public: it only starts the power iteration
        for name, p in parameters.items():
            if p.dim() > 1 and self.r < min(p.shape[0], p[0].numel()):
                self.right[name] = torch.randn(p[0].numel(), self.r, generator=generator).to(p)

    def gradients(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._project(name, noised) if name in self.right else noised for name, noised in sums.items()}

    def _project(self, name: str, noised: Tensor) -> Tensor:
        """One power iteration: P = orth(G Q), Q = G^T P, and P Q^T instead of G."""
        g = noised.flatten(1)
        left = torch.linalg.qr(g @ self.right[name].to(g)).Q
        self.right[name] = g.t() @ left
        return (left @ self.right[name].t()).view_as(noised)


class PowerSGDTrainer(DPTrainer):
    """DPTrainer with another method: all else, from sampling to the ledger, stays."""

    def __init__(self, *args, r: int = 4, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.r = r

    def create_method(self) -> Method:
        return PowerSGD(self.r)


def made_up_records(n: int) -> list[dict]:
    """Sentences of 25 random tokens; the label says whether token 1 outnumbers token 2."""
    tokens = torch.randint(1, 3, (n, 25), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row.tolist(), "labels": int((row == 1).sum() > 12)} for row in tokens]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a tiny classifier with DP-PowerSGD.")
    parser.add_argument("--r", type=int, default=4, help="rank of the approximation (default: %(default)s)")
    parser.add_argument("--noise_multiplier", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    config = BertConfig(
        vocab_size=4, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    records = made_up_records(2048 + 256)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PowerSGDTrainer(
            BertForSequenceClassification(config),
            TrainingArguments(
                folder, max_steps=options.steps, learning_rate=5e-3, per_device_train_batch_size=64, report_to=[],
                logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True,
            ),
            dp_config=DPConfig(noise_multiplier=options.noise_multiplier, expected_batch_size=128),
            train_dataset=records[:2048],
            eval_dataset=records[2048:],
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            r=options.r,
        )  # fmt: skip
        trainer.train()
        print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, epsilon {trainer.privacy_spent().epsilon:.2f}")


if __name__ == "__main__":
    main()
