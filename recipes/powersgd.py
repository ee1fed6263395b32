"""DP-PowerSGD (a baseline of the RGP paper), and how to add a method: subclass `Method`, return it to the trainer.

PowerSGD (Vogels et al. 2019) approximates the gradient G (rows, columns) of each weight by P Q^T of rank r. The
influence of one record on P and Q is hard to bound, so noise is added to the full gradient *before* the projection.
Everything after the noise is post-processing, and the ledger charges a step of DP-SGD. RGP projects first and adds
noise to r (rows + columns) numbers instead of rows * columns; Table 2 of the paper shows the difference.

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
from hf_private.methods.subspace import orthonormal
from hf_private.trainer.trainer import DPTrainer


class PowerSGD(Method):
    """DP-SGD that replaces the noised gradients of matrices by their rank-r approximation.

    The blocks (what is clipped and noised) are those of the base class, one for each parameter; only the computation
    after the noise differs. Each step starts from the Q of the previous step, so one power iteration is enough.
    """

    def __init__(self, r: int) -> None:
        self.r = r
        self.right: dict[str, Tensor] = {}  # Q (columns, r) by parameter name

    def describe(self) -> str:
        return f"DP-PowerSGD: noised gradients projected on rank {self.r}"

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().attach(parameters)
        generator = torch.Generator().manual_seed(0)  # public: it only starts the power iteration
        for name, p in parameters.items():
            if p.dim() > 1 and self.r < min(p.shape[0], p[0].numel()):
                self.right[name] = torch.randn(p[0].numel(), self.r, generator=generator).to(p)

    def gradient(self, name: str, sums: Mapping[str, Tensor]) -> Tensor:
        return self._project(name, sums[name]) if name in self.right else sums[name]

    def _project(self, name: str, noised: Tensor) -> Tensor:
        """One power iteration: P = orth(G Q), Q = G^T P; returns P Q^T instead of G."""
        g = noised.flatten(1)
        left = orthonormal(g @ self.right[name].to(g))
        self.right[name] = g.t() @ left
        return (left @ self.right[name].t()).view_as(noised)


class PowerSGDTrainer(DPTrainer):
    """DPTrainer with another method. Everything else, from sampling to the ledger, stays the same."""

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
    parser.add_argument("--output_dir", help="keep the model and its card here (default: keep nothing)")
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
                options.output_dir or folder, max_steps=options.steps, learning_rate=5e-3,
                per_device_train_batch_size=64, report_to=[], logging_strategy="no", save_strategy="no",
                disable_tqdm=True, use_cpu=True,
            ),
            dp_config=DPConfig(noise_multiplier=options.noise_multiplier, expected_batch_size=128),
            train_dataset=records[:2048],
            eval_dataset=records[2048:],
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            r=options.r,
        )  # fmt: skip
        trainer.train()
        print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, epsilon {trainer.privacy_spent().epsilon:.2f}")
        if options.output_dir:
            trainer.save_model()  # with its card, which names DP-PowerSGD


if __name__ == "__main__":
    main()
