"""Claims of epsilon and delta in prose, however they are spelled.

A card's privacy section is compared word for word, so it cannot hide a claim. The rest of a card is free text, and so
are its metadata. A number counts as a claim if it stands where a reader takes it for the model's epsilon or delta:
"epsilon equals 0.1", "(0.1, 1e-5)-DP", "privacy budget: one tenth", "ln 1.1", or below "epsilon" in a table. So do
the parameters of zero-concentrated (rho) and Gaussian (mu) differential privacy. Numbers of other epsilons, such as
Adam's, do not count; where the words leave a doubt, they are reported without judging the card.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .claim_vocabulary import (
    AFTER_CARDINAL,
    ATTACHED,
    BUDGET,
    CARDINALS,
    DELTA,
    DIRECT,
    EPSILON,
    FILLERS,
    JOINTS,
    NUMERICAL,
    OTHER,
    OTHER_NOTIONS,
    PARTS,
    PRIVATE,
    UNITS,
)
from .plain_text import plain_text

CONTEXT = 300  # letters to each side that say what an epsilon is
REACH = 12  # tokens between a name and its number
TINY = 1e-3  # the largest epsilon that anyone uses for numerical stability
ABSURD = 1e-6  # smaller values are no privacy parameters

TOKEN = re.compile(
    r"(?P<number>(?:ln|log)\s?\(?\s?\d{1,9}(?:\.\d{1,9})?\)?|(?<![a-z])(?:e\s?\^|exp)\s?\(?\s?-?\s?\d{1,9}(?:\.\d{1,9})?\)?"
    r"|\d{1,15}(?:\.\d{1,30})?\s?x\s?10\s?\^\s?[+-]?\d{1,3}|10\s?\^\s?[+-]?\d{1,3}|\d{1,15}\s?/\s?\d{1,15}"
    r"|0,\d{1,30}(?!\d*\s?e)|(?:\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})(?:e[+-]?\d{1,3}(?!\w))?(?:\s?%)?)"
    r"|(?P<word>[^\W\d_]{1,40})|(?P<symbol>[^\w\s])"
)

FUNCTION = re.compile(r"ln|log|exp|e(?=\^)")


class Token(NamedTuple):
    """A number, a word or a symbol of a text."""

    text: str
    value: float | None
    start: int
    end: int


@dataclass(frozen=True)
class Claim:
    """A number that a text gives for epsilon or delta.

    Args:
        name: "epsilon", "delta", "rho" (of zCDP) or "mu" (of GDP).
        excerpt: The words around it.
        doubtful: Whether the words around it speak of another epsilon.
    """

    name: str
    value: float
    excerpt: str
    doubtful: bool = False


def find_claims(text: str) -> Iterator[Claim]:
    """All claims of a Markdown text, in their order.

    >>> [(claim.name, claim.value) for claim in find_claims("It is (0.1, 1e-5)-DP: epsilon equals one tenth.")]
    [('epsilon', 0.1), ('delta', 1e-05), ('epsilon', 0.1)]
    >>> list(find_claims("Adam with eps=1e-8, epsilon-greedy exploration, layer_norm_eps 1e-12"))
    []
    """
    plain = plain_text(text)
    yield from _in_tables(plain)
    tokens = [
        Token(found[0], _value(found["number"]) if found["number"] else None, found.start(), found.end())
        for found in TOKEN.finditer(plain)
    ]
    for index, token in enumerate(tokens):
        if token.text in EPSILON:
            yield from _of_epsilon(plain, tokens, index)
        elif token.text in DELTA:
            yield from _of_delta(plain, tokens, index)
        elif token.text in ("dp", "differential", "differentially"):
            yield from _before_dp(plain, tokens, index)
        elif token.text in OTHER_NOTIONS:
            yield from _of_other_notion(plain, tokens, index)
        if token.text in ("dp", "privacy"):
            yield from _of_budget(plain, tokens, index)


def _of_epsilon(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """A number after the word epsilon, or else before it."""
    found = _number_after(tokens, index, FILLERS)
    if found is not None:
        value, last = found
        if _is_exponent(tokens, index):  # e^epsilon = 1.1
            value = math.log(value) if value > 0 else -math.inf
        role = _role(plain, tokens, index, last, value)
        if role != "numerical":
            yield Claim("epsilon", value, _excerpt(plain, tokens[index].start), doubtful=role == "other")
        return
    first = index - 1
    while first >= 0 and index - first <= 3 and tokens[first].text in ATTACHED:
        first -= 1
    number = tokens[first] if first >= 0 else None
    if number is None or number.value is None or "\n" in plain[number.end : tokens[index].start]:
        yield from _in_sentence(plain, tokens, index)
        return
    between = plain[number.end : tokens[index].start]
    subtraction = "-" in between and (number.value == 1 or " " in between)
    if not subtraction:
        role = _role(plain, tokens, index, index, number.value)
        if role != "numerical":
            yield Claim("epsilon", number.value, _excerpt(plain, number.start), doubtful=role == "other")


def _is_exponent(tokens: list[Token], index: int) -> bool:
    before = [token.text for token in tokens[max(0, index - 2) : index]]
    return before in (["e", "^"], ["exp", "("])


def _in_sentence(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """A decimal number after epsilon and words that we do not know: "epsilon drops to 0.1". It leaves a doubt."""
    for token in tokens[index + 1 : index + 1 + REACH]:
        if token.text in (".", "|") or token.text in EPSILON or "\n" in plain[tokens[index].end : token.start]:
            return
        if token.value is not None and re.search(r"\d[.,]\d", token.text):
            role = _role(plain, tokens, index, index, token.value)
            if role != "numerical":
                yield Claim("epsilon", token.value, _excerpt(plain, tokens[index].start), doubtful=True)
            return


def _of_delta(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """A number after the word delta, in a line that speaks of privacy."""
    line = _line(plain, tokens[index].start)
    speaks_of_privacy = not (EPSILON | PRIVATE).isdisjoint(_words(line))
    found = _number_after(tokens, index, FILLERS - DELTA)
    before = tokens[index - 1].text if index else ""
    if speaks_of_privacy and found is not None and before not in ("huber", "min", "minimum"):
        yield Claim("delta", found[0], _excerpt(plain, tokens[index].start))


def _before_dp(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """`0.1-DP` and `(0.1, 1e-5)-differentially private`."""
    after = [token.text for token in tokens[index + 1 : index + 3]]
    if after == ["-", "sgd"] or after == ["-", "adam"]:  # "Opacus 1.5 DP-SGD" is a version
        return
    hyphen = index > 0 and tokens[index - 1].text == "-"
    last = index - 2 if hyphen else index - 1
    if last < 0:
        return
    if tokens[last].text == ")":
        inside = []
        for token in reversed(tokens[max(0, last - REACH) : last]):
            if token.text == "(":
                break
            inside.append(token)
        numbers = [token for token in reversed(inside) if token.value is not None]
        if len(numbers) == 2:
            for name, token in zip(("epsilon", "delta"), numbers, strict=True):
                assert token.value is not None
                yield Claim(name, token.value, _excerpt(plain, token.start))
    elif (value := tokens[last].value) is not None and (hyphen or value != int(value)):
        yield Claim("epsilon", value, _excerpt(plain, tokens[last].start))


def _of_other_notion(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """`0.005-zCDP`, "zCDP with rho = 0.005", "0.1-GDP", "mu = 0.1 (GDP)"."""
    name, letters = OTHER_NOTIONS[tokens[index].text]
    hyphen = index > 1 and tokens[index - 1].text == "-"
    before = tokens[index - 2 if hyphen else index - 1].value if index else None
    if before is not None and (hyphen or name == "rho"):
        yield Claim(name, before, _excerpt(plain, tokens[index - 1].start))
        return
    for place in range(max(0, index - REACH), min(index + REACH, len(tokens))):
        found = _number_after(tokens, place, FILLERS) if tokens[place].text in letters else None
        if found is not None:
            yield Claim(name, found[0], _excerpt(plain, tokens[place].start))
            return


def _of_budget(plain: str, tokens: list[Token], index: int) -> Iterator[Claim]:
    """A number after "privacy budget", "DP level", "privacy:" and the like."""
    following = tokens[index + 1].text if index + 1 < len(tokens) else ""
    if following in BUDGET:
        found = _number_after(tokens, index + 1, FILLERS)
    else:
        found = _number_after(tokens, index, DIRECT)
    if found is not None:
        yield Claim("epsilon", found[0], _excerpt(plain, tokens[index].start))


def _in_tables(plain: str) -> Iterator[Claim]:
    """Numbers below or beside a cell that says epsilon."""
    columns: list[int] = []
    inside = False
    for line in plain.split("\n"):
        if "|" not in line:
            inside = False
            continue
        cells = [_words(cell) for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        named = [column for column, words in enumerate(cells) if EPSILON & {*words}]
        if not inside:
            columns = named
        beside = range(1, len(cells)) if 0 in named else ()
        for column in sorted({*beside, *(columns if inside else ())}):
            value = _only_number(line.strip().removeprefix("|").split("|")[column]) if column < len(cells) else None
            if value is not None:
                yield Claim("epsilon", value, line.strip()[:80])
        inside = True


def _number_after(tokens: list[Token], index: int, fillers: frozenset[str]) -> tuple[float, int] | None:
    """The number that a name is followed by, and its last token."""
    abbreviation = tokens[index].text == "eps" and index + 1 < len(tokens) and tokens[index + 1].text == "."
    start = index + 2 if abbreviation else index + 1
    for place in range(start, min(start + REACH, len(tokens))):
        token = tokens[place]
        if token.value is not None:
            if place == index + 1 and token.start == tokens[index].end and token.text.isdigit():
                continue  # a subscript: eps1 = ...
            unit = next((after.text for after in tokens[place + 1 : place + 3] if after.text != "-"), "")
            return None if token.text.isdigit() and unit in UNITS else (token.value, place)
        words = _number_in_words(tokens, place)
        if words is not None:
            return words
        if token.text not in fillers and token.text not in JOINTS:
            return None
    return None


def _number_in_words(tokens: list[Token], place: int) -> tuple[float, int] | None:
    """ "one tenth", "a half", "zero point one", "two" at the end of a clause."""
    texts = [token.text for token in tokens[place : place + 4]] + [""] * 4
    if texts[0] in PARTS:
        return PARTS[texts[0]], place
    if texts[0] == "point" and texts[1] in CARDINALS:
        return CARDINALS[texts[1]] / 10, place + 1
    if texts[0] not in CARDINALS:
        return None
    value = CARDINALS[texts[0]]
    fraction = texts[2] if texts[1] == "-" else texts[1]
    if fraction in PARTS:
        return value * PARTS[fraction], place + 1
    if texts[1] == "point" and texts[2] in CARDINALS:
        return value + CARDINALS[texts[2]] / 10, place + 2
    ends = not texts[1].isalnum() or texts[1] in AFTER_CARDINAL
    return (value, place) if ends else None


def _role(plain: str, tokens: list[Token], index: int, last: int, value: float) -> str:
    """What an epsilon is: "privacy", "numerical" (Adam's, a layer norm's) or "other", which leaves a doubt."""
    near = tokens[max(0, index - REACH) : index]
    before = [token.text for token in near if "\n" not in plain[token.end : tokens[index].start]]
    after = [token.text for token in tokens[last + 1 : last + 5]]
    owner = next((word for word in reversed(before) if word.startswith(NUMERICAL) or word in PRIVATE), "")
    belongs_after = after[:1] in (["of"], ["in"], ["for"], ["("]) and any(word.startswith(NUMERICAL) for word in after)
    if value <= TINY and (owner.startswith(NUMERICAL) or belongs_after):
        return "numerical"
    line = _words(_line(plain, tokens[index].start))
    if PRIVATE.isdisjoint(line):
        if value <= ABSURD or any(word.startswith(OTHER) for word in line):
            return "other"
    return "privacy"


def _value(number: str) -> float:
    text = re.sub(r"\s", "", number)
    if text.endswith("%"):
        return _value(text[:-1]) / 100
    if function := FUNCTION.match(text):
        argument = float(text[function.end() :].strip("()^"))
        if function[0] in ("ln", "log"):
            return math.log(argument) if argument > 0 else -math.inf
        return math.exp(min(argument, 700.0))
    if "^" in text:
        factor, _, power = text.rpartition("^")
        return float(factor.removesuffix("10").removesuffix("x") or 1) * 10.0 ** int(power)
    if "/" in text:
        numerator, denominator = text.split("/")
        return int(numerator) / int(denominator) if int(denominator) else math.inf
    return float(text.replace(",", "."))


def _only_number(cell: str) -> float | None:
    """The number of a table's cell that holds nothing else."""
    found = list(TOKEN.finditer(cell))
    numbers = [match["number"] for match in found if match["number"]]
    return _value(numbers[0]) if numbers and not any(match["word"] for match in found) else None


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def _line(plain: str, position: int) -> str:
    """The line around a position, at most `CONTEXT` letters to each side."""
    before = plain[max(0, position - CONTEXT) : position]
    after = plain[position : position + CONTEXT]
    return before.rpartition("\n")[2] + after.partition("\n")[0]


def _excerpt(plain: str, position: int) -> str:
    return " ".join(plain[max(0, position - 20) : position + 60].split())
