"""Checks of a card against its statement: section, warning, metadata, curve, and claims in all other text."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from string import Template
from typing import Any

import numpy as np
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_private.accounting.tradeoff import gaussian_profile
from hf_private.spending.statement import STATEMENT

from .card import CARD, split_card
from .claims import Claim, find_claims
from .curve import CURVE_FILE
from .findings import UNKNOWN, WARNING, WRONG, Found
from .plain_text import cut
from .section import TAGS, render_caution, render_curve, render_section, template_fields, yaml_block
from .snapshot import Snapshot
from .template_versions import is_known, template

METADATA_LIMIT = 50_000  # letters of YAML, whose parser is slow
PATH_LIMIT = 200  # letters of the path to a key
CLAIMS_LIMIT = 20  # that are reported
FREE_FIELDS = ("method", "optimizer", "objective_row", "data", "base_model", "versions")  # printed, not recomputed
LOWER_BOUNDS = re.compile(r"\b(mia_epsilon|canaries_epsilon|canaries_highest) \S+")  # what attacks found
BLOCK = "differential_privacy"
FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)
HIDING = re.compile(r"<(/?)(details|div|noscript|pre|script|select|span|style|svg|table|template|textarea)\b", re.I)


def check_card(statement: dict[str, Any], snapshot: Snapshot) -> Found:
    """README.md and the curve against the statement."""
    readme = snapshot.texts[CARD]
    if readme is None:
        yield UNKNOWN, f"there is no {CARD}"
        return
    try:
        metadata = list(_flatten(_metadata_node(readme)))
        parts = split_card(readme)
    except (ValueError, yaml.YAMLError) as error:
        yield WRONG, f"{CARD} cannot be read: {str(error).splitlines()[0]}"
        return
    if is_known(statement):
        yield from _compare_text("privacy section", parts.section, render_section(statement))
        yield from _compare_text("warning", parts.caution, render_caution(statement))
        if snapshot.texts[CURVE_FILE] != render_curve(statement):
            yield WRONG, f"{CURVE_FILE} is not the curve of the statement"
    elif f"epsilon = {statement['guarantee']['epsilon']}" not in parts.section:
        yield WRONG, f"{CARD}: the privacy section does not say epsilon = {statement['guarantee']['epsilon']}"
    if _is_hidden(parts.before):
        yield WRONG, f"{CARD}: the privacy section is inside a code block, a comment or an HTML element, and not shown"
    yield from _compare_metadata(statement, parts.card.data, snapshot.texts[STATEMENT] or "")
    yield from _judge("prose", parts.rest, statement)
    yield from _judge("metadata", "\n\n".join(metadata), statement)
    yield from _judge(f"facts of {STATEMENT}", "\n\n".join(_printed_facts(statement)), statement)


def _judge(where: str, text: str, statement: dict[str, Any]) -> Found:
    """Claims that are better than the statement's."""
    for claim in islice(filter(lambda claim: _is_better(claim, statement), find_claims(text)), CLAIMS_LIMIT):
        words = f"{claim.name} {claim.value:g}, better than the statement: {claim.excerpt!r}"
        if claim.doubtful:
            yield WARNING, f"{CARD}, {where}: this may claim {words}"
        else:
            yield WRONG, f"{CARD}, {where}: claims {words}"


def _is_better(claim: Claim, statement: dict[str, Any]) -> bool:
    guarantee = statement["guarantee"]
    delta = float(guarantee["delta"])
    if claim.name == "delta":
        return claim.value < delta * (1 - 1e-9)
    stated_mu = (guarantee.get("risk") or {}).get("mu")
    if claim.name == "mu" and isinstance(stated_mu, (int, float)):
        return claim.value < stated_mu * (1 - 1e-9)
    implied: dict[str, Callable[[float, float], float]] = {
        "epsilon": lambda epsilon, _: epsilon,
        "rho": epsilon_of_rho,
        "mu": epsilon_of_mu,
    }
    return implied[claim.name](claim.value, delta) < float(guarantee["epsilon"]) * (1 - 1e-9)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Epsilon of rho-zCDP.

    >>> round(epsilon_of_rho(0.005, 1e-5), 3)
    0.485
    """
    return rho + 2 * math.sqrt(max(0.0, rho) * math.log(1 / delta))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP, rounded up on a grid.

    >>> round(epsilon_of_mu(1.0, 1e-5), 1)
    4.4
    """
    grid = np.geomspace(1e-6, 1e3, 5000)
    enough = gaussian_profile(mu, grid) <= delta
    return float(grid[enough.argmax()]) if enough.any() else math.inf


def _printed_facts(statement: dict[str, Any]) -> Iterator[str]:
    """Facts that the section prints and that cannot be recomputed."""
    name = "card.md" if statement["private"] else "card_not_private.md"
    used = {*Template(template(statement, name)).get_identifiers()}
    fields = template_fields(statement)
    yield from (fields[field] for field in FREE_FIELDS if field in used)
    audit = LOWER_BOUNDS.sub("", fields["audit_values"])
    yield audit if "audit_values" in used else audit.replace("canaries_claimed_epsilon", "")


def _is_hidden(before: str) -> bool:
    """Whether the text before the section leaves a code block, a comment or an element open."""
    if len(FENCE.findall(before)) % 2 or before.rfind("<!--") > before.rfind("-->"):
        return True
    shown = cut(cut(before, "```", "```"), "`", "`")
    open_tags: Counter[str] = Counter()
    for closing, name in HIDING.findall(shown):
        open_tags[name.lower()] += -1 if closing else 1
    return any(count > 0 for count in open_tags.values())


def _compare_text(what: str, got: str, expected: str) -> Found:
    got_lines, lines = got.strip("\n").split("\n"), expected.strip("\n").split("\n")
    if got_lines == lines:
        return
    if not got.strip():
        yield WRONG, f"{CARD} has no {what}"
    elif not expected.strip():
        yield WRONG, f"{CARD} has a {what} that does not follow from the statement"
    else:
        pairs = zip([*got_lines, *[""] * len(lines)], [*lines, *[""] * len(got_lines)], strict=False)
        got_line, line = next((a, b) for a, b in pairs if a != b)
        yield WRONG, f"{CARD}: the {what} says {got_line[:120]!r}, the statement gives {line[:120]!r}"


def _compare_metadata(statement: dict[str, Any], data: Any, text: str) -> Found:
    block = data.get(BLOCK)
    if not isinstance(block, dict):
        yield WRONG, f"{CARD} has no YAML block `{BLOCK}`"
        return
    expected = yaml_block(statement)
    expected["record_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    for key in {**expected, **block}:
        got = block.get(key)
        if got != expected.get(key) or isinstance(got, bool) != isinstance(expected.get(key), bool):
            yield WRONG, f"{CARD}: `{BLOCK}.{key}` is {str(got)[:80]!r}, not {expected.get(key)!r}"
    tags = data.get("tags")
    wrong = {*TAGS} & {*map(str, tags if isinstance(tags, list) else [tags])}
    if wrong and not statement["private"]:
        yield WRONG, f"{CARD} has the tag `{min(wrong)}`, but the statement is not private"


def _metadata_node(readme: str) -> yaml.Node | None:
    """The metadata, parsed but not built: every key is still there, duplicates included."""
    found = REGEX_YAML_BLOCK.search(readme)
    if not found:
        return None
    if len(found[2]) > METADATA_LIMIT:
        raise ValueError(f"its metadata has {len(found[2])} letters, at most {METADATA_LIMIT} are read")
    return yaml.compose(found[2], Loader=yaml.SafeLoader)


def _flatten(node: yaml.Node | None, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Metadata as lines of prose, `privacy epsilon: 0.1`; our own block, which is compared elsewhere, is left out.

    The scalars of one mapping stand together, forwards and backwards: `type: epsilon value: 0.1`. A node that is used
    several times is visited once.
    """
    seen = set() if seen is None else seen
    if isinstance(node, yaml.ScalarNode):
        yield f"{path}: {node.value}"
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _flatten(item, path, seen)
        return
    items = [(str(key.value), item) for key, item in node.value]
    for key, times in Counter(key for key, _ in items).items():
        if times > 1:
            raise ValueError(f"its metadata has the key `{key[:80]}` twice")
    scalars = [f"{key}: {item.value}" for key, item in items if isinstance(item, yaml.ScalarNode)]
    yield f"{path} {' '.join(scalars)}"
    yield f"{path} {' '.join(reversed(scalars))}"
    for key, item in items:
        lines = _flatten(item, f"{path} {key}".strip()[-PATH_LIMIT:], seen)
        if path or key != BLOCK:
            yield from lines
        else:
            list(lines)  # only to find keys that stand twice
