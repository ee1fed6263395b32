"""A report as a CycloneDX 1.6 bill of materials with a model card (ECMA-424), as JSON."""

import base64
import uuid
from typing import Any

from hf_private.publishing.pictures import tradeoff_svg

from .content import PRIVATE, Report, sha256, unit


def to_cyclonedx(report: Report) -> dict[str, Any]:
    """One machine-learning model, its base model, its weights and its training data."""
    statement, digest = report.statement, sha256(report.statement)
    versions = statement["versions"]
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": report.name,
        "description": report.headline,
        "modelCard": _model_card(report),
        "properties": _properties(report, digest),
    }
    if base := statement["scope"]["base_model"]:
        model["pedigree"] = {"ancestors": [{"type": "machine-learning-model", "bom-ref": "base-model", "name": base}]}
    if statement["weights"]:
        model["components"] = [
            {"type": "file", "bom-ref": f"weights:{name}", "name": name, "hashes": [_sha256(content)]}
            for name, content in statement["weights"].items()
        ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'hf_private:{report.date}:{digest}')}",
        "version": 1,
        "metadata": {
            "timestamp": f"{report.date}T00:00:00Z",
            "tools": {
                "components": [{"type": "library", "name": "hf_private", "version": versions.get("hf_private", "")}]
            },
        },
        "components": [
            model,
            {
                "type": "data",
                "bom-ref": "training-data",
                "name": statement["dataset"]["name"] or "training data",
                "data": [
                    {
                        "type": "dataset",
                        "name": statement["dataset"]["name"] or "training data",
                        "description": f"Training data, {statement['dataset']['num_records'] or 'unknown number of'}"
                        " records.",
                    }
                ],
            },
        ],
    }


def _model_card(report: Report) -> dict[str, Any]:
    statement, risk = report.statement, report.risk
    guarantee, mechanism = statement["guarantee"], statement["mechanism"]
    not_covered = (f"Not covered: {what}" for what in statement["scope"]["not_covered"])
    limits = [*report.reasons, *statement["caveats"], *not_covered]
    card: dict[str, Any] = {
        "bom-ref": "model-card",
        "modelParameters": {"datasets": [{"ref": "training-data"}]},
        "considerations": {
            "technicalLimitations": limits,
            "ethicalConsiderations": [
                {
                    "name": f"An attacker who sees the model learns about one {unit(statement)} of its training data",
                    "mitigationStrategy": f"{report.headline} {mechanism['method']}. {risk}"
                    if risk
                    else f"None. {report.headline} Treat the model as you treat its training data.",
                }
            ],
        },
    }
    if risk is None:
        return card
    metrics = {
        "differential privacy: epsilon": guarantee["epsilon"],
        "differential privacy: delta": guarantee["delta"],
        "membership inference: largest advantage": risk.to_dict()["advantage"],
        "membership inference: largest accuracy at even odds": risk.to_dict()["accuracy"],
    }
    for rate, share in risk.to_dict()["tpr_at_fpr"].items():
        metrics[f"membership inference: largest true positive rate at false positive rate {rate}"] = share
    svg = tradeoff_svg(risk.curve, risk.tpr).encode()
    image = {"contentType": "image/svg+xml", "encoding": "base64", "content": base64.b64encode(svg).decode()}
    card["quantitativeAnalysis"] = {
        "performanceMetrics": [{"type": name, "value": str(value)} for name, value in metrics.items()],
        "graphics": {
            "description": "Upper bounds on attacks",
            "collection": [{"name": "Members found against false alarms", "image": image}],
        },
    }
    return card


def _properties(report: Report, digest: str) -> list[dict[str, str]]:
    statement = report.statement
    guarantee, mechanism, ledger = statement["guarantee"], statement["mechanism"], statement["ledger"]
    values = {
        "private": str(report.status == PRIVATE).lower(),
        "epsilon": guarantee["epsilon"] if report.status == PRIVATE else "inf",
        "delta": guarantee["delta"],
        "unit": statement["privacy_unit"]["unit"],
        "records_per_unit": statement["privacy_unit"]["records_per_unit"],
        "adjacency": statement["adjacency"],
        "method": mechanism["method"],
        "clip_norm": mechanism["clip_norm"],
        "steps": mechanism["steps"],
        "ledger_head": ledger["head"] or "none",
        "statement_sha256": digest,
    }
    return [{"name": f"hf_private:{name}", "value": str(value)} for name, value in values.items()]


def _sha256(content: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": content}
