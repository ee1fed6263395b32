"""Public English text that is available offline: the documentation of Python, and sentences from the templates below.

The sentences describe fictional places; none comes from the E2E data or another dataset.

>>> public_sentences(2) == public_sentences(2)
True
"""

import ast
import pydoc_data.topics
import random
import re
import sysconfig
from pathlib import Path

NAMES = (
    "Harbour Lantern", "Old Mill", "Copper Kettle", "Juniper House", "Marigold", "Quiet Fox", "Seven Steps", "Orchard",
    "Windmill", "Paper Crane", "Salt Cellar", "North Gate", "Wooden Spoon", "Larch Tree", "Blue Door", "Station Yard",
)  # fmt: skip
KINDS = (
    "bakery", "bistro", "tea room", "hotel", "bookshop", "diner", "inn", "market hall", "canteen", "grill", "museum",
    "wine bar", "theatre", "guest house",
)  # fmt: skip
DISHES = (
    "soup", "fresh bread", "noodles", "grilled fish", "pancakes", "dumplings", "roast vegetables", "pies", "curry",
    "salads", "sandwiches", "cheese", "stew", "cakes", "rice", "breakfast all day",
)  # fmt: skip
STYLES = ("Greek", "Mexican", "Thai", "Spanish", "Korean", "Lebanese", "Polish", "vegetarian", "home-made", "seasonal")
PLACES = (
    "by the canal", "near the old bridge", "in the north of the town", "next to the library", "on the main square",
    "behind the railway station", "close to the park", "at the edge of the village", "beside the harbour",
)  # fmt: skip
PRICES = ("low", "fair", "moderate", "high", "rather high", "reasonable", "average", "very low")
PRAISE = ("excellent", "good", "poor", "mixed", "outstanding", "average", "disappointing", "very warm")
GUESTS = ("families", "children", "students", "couples", "large groups", "travellers", "people in a hurry")
DAYS = ("on Mondays", "at the weekend", "in the evening", "every morning", "during the summer", "until late at night")
TEMPLATES = (
    "{name} is a {kind} {place}. It serves {style} food and its prices are {price}.",
    "The {kind} called {name} offers {dish} and {dish2} {day}.",
    "If you are looking for a {kind} {place}, try {name}: the {dish} has {praise} reviews.",
    "{name}, {place}, is a {kind} that welcomes {guests}.",
    "Prices at {name} are {price}, and its customers give it a {praise} rating.",
    "There is a {style} {kind} {place}. It is named {name} and is not meant for {guests}.",
    "A {kind} with {praise} {dish}, {name} can be found {place}.",
    "{guests} like {name} because the {dish} is {praise} and the prices are {price}.",
    "The food at {name} was {praise}, but the {kind} is closed {day}.",
    "You will find {name} {place}; this {kind} has {style} dishes such as {dish}.",
    "I went to {name} {day} and thought that the {dish} was {praise}.",
    "With {price} prices and {praise} service, {name} is a {kind} for {guests}.",
    "What a {praise} film this was, we saw it {day} in the theatre {place}.",
    "The story is {praise}, the actors are {praise}, and {guests} will enjoy it {day}.",
)


def public_sentences(count: int, seed: int = 0) -> list[str]:
    """`count` sentences from the templates, the same for the same seed."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        dish, dish2 = draw.sample(DISHES, 2)
        text = draw.choice(TEMPLATES).format(
            name=f"{draw.choice(('', 'The '))}{draw.choice(NAMES)}", kind=draw.choice(KINDS),
            style=draw.choice(STYLES), place=draw.choice(PLACES), price=draw.choice(PRICES),
            praise=draw.choice(PRAISE), day=draw.choice(DAYS), guests=draw.choice(GUESTS), dish=dish, dish2=dish2,
        )  # fmt: skip
        made.append(text[0].upper() + text[1:])
    return made


def python_documentation() -> list[str]:
    """Paragraphs of the language reference and of the docstrings of the standard library, in a fixed order."""
    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    paragraphs = (re.sub(r"\s+", " ", part).strip() for text in texts for part in text.split("\n\n"))
    return list(dict.fromkeys(part for part in paragraphs if _is_prose(part)))


def _is_prose(text: str) -> bool:
    """Whether a text is long and mostly letters and spaces: no table, grammar rule or code."""
    return len(text) > 60 and sum(c.isalpha() or c == " " for c in text) > 0.85 * len(text)
