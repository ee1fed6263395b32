"""F1 of class 1, as a local module for `evaluate.load(path)`, without the Hub."""

import datasets
import evaluate
import numpy as np


class F1(evaluate.Metric):
    """Harmonic mean of precision and recall of class 1; 0 if neither is defined."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=__doc__, citation="", features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        guessed, true = np.equal(predictions, 1), np.equal(references, 1)
        named = int(guessed.sum()) + int(true.sum())
        return {"f1": 2 * int((guessed & true).sum()) / named if named else 0.0}
