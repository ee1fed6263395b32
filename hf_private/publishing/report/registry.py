"""An entry for the Differential Privacy Deployments Registry (OpenDP and NIST; schema paper arXiv:2509.13509).

The fields are those of `schemas/deployments-schema.yaml` in github.com/opendp/deployments-registry-data, as of
September 2026 (commit 057e5d8). What a statement cannot know is marked `FILL_IN`.
"""

from typing import Any

import yaml

from .answers import answers, number_of_units
from .content import Report, sha256, unit

FILL_IN = "(fill in)"


def to_registry(report: Report) -> dict[str, Any]:
    """The entry of a private model, as a draft.

    Raises:
        ValueError: if the model is not private, or its claim is wrong: the registry lists private deployments.
    """
    if report.risk is None:
        raise ValueError(f"the registry lists differentially private deployments, and {report.name} is none")
    statement = report.statement
    text = {one.component: one.text for one in answers(statement, claimed=True)}
    guarantee, data = statement["guarantee"], statement["dataset"]["name"]
    k, column = statement["privacy_unit"]["records_per_unit"], statement["privacy_unit"].get("column")
    number = number_of_units(statement)
    level = "Record-level" if k == 1 else f"Person-level (up to {k} records)"
    tuning = statement["tuning"]["runs"]
    loss: dict[str, Any] = {
        "privacy_unit": f"Unit-level ({column})" if column else level,
        "privacy_unit_details": text["Unit of privacy"],
        "privacy_parameters": {"epsilon": guarantee["epsilon"], "delta": guarantee["delta"]},
        "privacy_parameters_details": f"{text['Privacy parameters']} {report.risk}",
    }
    if number and (k == 1 or column):
        loss["number_of_privacy_units"] = number
    return {
        "url_slug": "".join(c if c.isalnum() else "-" for c in report.name.lower()).strip("-") or "model",
        "deployment": {
            "basic": {
                "name": report.name,
                "data_curators": [{"data_curator_name": FILL_IN, "data_curator_type": "Industry"}],
                "description": f"A fine-tuned {statement['scope']['base_model'] or 'model'}. {FILL_IN}",
                "intended_use": FILL_IN,
                "data_product_type": "Machine learning model",
                "data_product_region": FILL_IN,
                "publication_date": report.date,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"All sets of records like those of the training data, {data or FILL_IN}.",
                "unprotected_quantities": _list(statement["scope"]["not_covered"]),
            },
            "privacy_loss": loss,
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": text["Trust model"],
                "trust_assumptions": "Whoever trains has the data and is trusted. Everybody who sees the weights or"
                " any checkpoint is not, and may have any other knowledge and any amount of computing.",
                "actors": f"Whoever trained the model; whoever can obtain it. {FILL_IN}",
                "release_type": "One release",
                "release_type_details": "The guarantee covers the weights and all earlier checkpoints of the run."
                " Further private training on the same records is charged to the same ledger.",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"Runs tried, all charged: {tuning:g}."
                if tuning
                else "The number of runs that were tried is not recorded, and none of them is charged.",
                "mechanisms": f"{text['Algorithms and correctness']} {text['Side channels']}",
                "composition": "All private steps on the records are composed numerically, with two accountants (PRV"
                f" and PLD); the larger bound counts, per {unit(statement)}.",
                "post_processing": "The optimizer and the learning-rate schedule see noised gradients only.",
                "justification": FILL_IN,
                "utility": FILL_IN,
                "additional_information": "Recompute the claim with `hf-private verify`. sha256 of the privacy"
                f" statement (privacy.json): {sha256(statement)}. Caveats: {' '.join(statement['caveats'])}",
            },
            "administrative": {"status": "Draft", "registry_authors": [FILL_IN], "tier": 3},
        },
    }


def to_yaml(entry: dict[str, Any]) -> str:
    """The entry as the YAML file that the registry asks for, with a list of what to fill in at its top."""
    todo = ", ".join(
        ("data_curators (name and type)", "description", "intended_use", "data_product_region", "publication_date")
    )
    head = (
        "# Draft for github.com/opendp/deployments-registry-data.\n"
        f"# Fill in: {todo},\n# actors, justification, utility, registry_authors; check all other fields.\n"
    )
    return head + yaml.dump(entry, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as the registry asks for."""

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
