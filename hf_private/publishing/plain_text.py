"""Markdown as a reader sees it: plain lower-case text without markup, LaTeX and look-alike letters."""

import html
import re
import unicodedata
from functools import cache
from urllib.parse import unquote

SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
RAISED_POINT = re.compile(r"\b0[·⋅](?=\d)")  # between a 0 and a digit: no multiplication
LOOK_ALIKES = str.maketrans(  # letters of other scripts that look like those of "epsilon", "delta" and "privacy"
    "аԁеіӏорсѕуνοιɛєϵ∊⁄∕٫‐‑‒–—−∶˜∼≅≃≐≲⩽×⋅·",
    "adeilopcsyvoiεεεε//.------:~~≈≈≈≤≤xxx",
)
LATEX_SYMBOLS = {
    "epsilon": " epsilon ",
    "varepsilon": " epsilon ",
    "eps": " epsilon ",
    "delta": " delta ",
    "approx": "≈",
    "simeq": "≈",
    "sim": "≈",
    "le": "≤",
    "leq": "≤",
    "leqslant": "≤",
    "lt": "<",
    "ge": "≥",
    "geq": "≥",
    "gt": ">",
    "times": "x",
    "cdot": "x",
    **{name: f" {name} " for name in ("exp", "ln", "log", "mu", "rho")},
}
FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d{1,9})\s*\}\s*\{\s*(\d{1,9})\s*\}")
COMMAND = re.compile(r"\\([a-z]{1,30}|[,;:! ])")
TAG = re.compile(r"</?([a-z][a-z0-9]{0,20})([^<>]{0,5000})>")
ATTRIBUTE = re.compile(r"""\b(?:alt|title|src|href|content|value|label|aria-label)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
AROUND_CELLS = re.compile(r"\s{0,9}(</?(?:t[dhr]|thead|tbody|tfoot)\b[^<>]{0,500}>)\s{0,9}")
CELLS = ("td", "th")
LINES = ("br", "dd", "div", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "table", "ul")
LINK = re.compile(r"\]\([ \n]{0,9}([^()\s]{0,2000})(?:\s[^()]{0,500})?\)")
MARKUP = str.maketrans({**dict.fromkeys("*`[]#{}$\\", ""), "_": " "})


def plain_text(text: str) -> str:
    r"""The words of a Markdown text; addresses of links and pictures follow at the end, because badges are pictures.

    >>> plain_text(r"**&epsilon;** &asymp; ０.１, $\varepsilon \leq 10^{-1}$")
    'ε ≈ 0.1,  epsilon  ≤ 10^-1'
    """
    text = cut(html.unescape(html.unescape(text)), "<!--", "-->")
    text = _latin(RAISED_POINT.sub("0.", text))
    addresses: list[str] = []

    def tag(found: re.Match[str]) -> str:
        addresses.extend(one or other for one, other in ATTRIBUTE.findall(found[2]))
        name, opens = found[1], not found[0].startswith("</")
        if name in CELLS:
            return "|" if opens else ""
        return "\n" if name in LINES or (name == "tr" and opens) else ""

    def link(found: re.Match[str]) -> str:
        addresses.append(found[1])
        return "]"

    text = LINK.sub(link, TAG.sub(tag, AROUND_CELLS.sub(r"\1", text)))
    text = FRACTION.sub(r" \1/\2 ", text)
    text = COMMAND.sub(lambda found: LATEX_SYMBOLS.get(found[1], " "), text)
    text = "\n".join([text.translate(MARKUP), *(_latin(unquote(address)).replace("_", " ") for address in addresses)])
    return re.sub(r"^[ \t]*>+", "", text, flags=re.MULTILINE)


def cut(text: str, begin: str, end: str, replacement: str = "", count: int = -1) -> str:
    """Text without what lies between two marks, marks included; `count` as in `str.replace`. Takes linear time.

    >>> cut("a (b) c (d", "(", ")")
    'a  c (d'
    """
    kept, start = [], 0
    while count != 0:
        first = text.find(begin, start)
        last = text.find(end, first + len(begin)) if first >= 0 else -1
        if last < 0:
            break
        kept += [text[start:first], replacement]
        start = last + len(end)
        count -= 1
    return "".join([*kept, text[start:]])


def _latin(text: str) -> str:
    """Letters and digits of all alphabets and widths as plain lower-case ones, as far as they look alike."""
    text = SUPERSCRIPTS.sub(lambda found: "^" + found[0], text)
    text = unicodedata.normalize("NFKC", text).casefold().translate(LOOK_ALIKES)
    return text.translate({ord(letter): _plain_letter(letter) for letter in set(text) if ord(letter) > 127})


@cache
def _plain_letter(letter: str) -> str:
    if unicodedata.category(letter) in ("Cf", "Mn", "Me"):  # invisible, or an accent
        return ""
    if unicodedata.category(letter) == "Nd":
        return str(unicodedata.decimal(letter))
    return " " if letter.isspace() else letter
