"""The data of the demo: synthetic support tickets by topic.

No person, address or order in them exists. They contain names, e-mail addresses and order numbers because real tickets
do, and private training must not leak them. Topics share words, and one ticket in three also mentions a second topic,
so that keywords alone do not determine the topic.
"""

import random
from typing import NamedTuple


class Ticket(NamedTuple):
    """One record: the text, and the index of its topic in `TOPICS`."""

    text: str
    label: int


# topic -> templates for its main sentence
COMPLAINTS = {
    "billing": [
        "I was charged twice for {item}",
        "the invoice for {item} shows the wrong amount",
        "my card was debited {price} and I do not know what for",
        "the discount code was not taken off the total",
        "the tax on my receipt looks too high",
        "you took {price} from my account although the order failed",
        "I need a corrected receipt for {item}",
    ],
    "delivery": [
        "{item} has not arrived and it is {days} days late",
        "the courier left {item} with a stranger",
        "tracking has not moved for {days} days",
        "the parcel with {item} went to the wrong street",
        "the driver said nobody was home, but we waited all day",
        "when will {item} finally get here",
        "the box came soaked and half open",
    ],
    "returns": [
        "I want to send {item} back and get my money",
        "how do I return {item}, I have no label",
        "it has been {days} days and the refund for {item} is still missing",
        "{item} does not fit, can I swap it for another size",
        "the return label cannot be printed",
        "you got {item} back last week but I have not seen my {price}",
        "is it too late to give {item} back after {days} days",
    ],
    "account": [
        "I cannot sign in since you changed the page",
        "the reset link for my password never comes",
        "somebody else has logged in as me",
        "please change the address on my profile",
        "my profile shows orders that are not mine",
        "the code for the second step is refused {days} times in a row",
        "I have two logins and want only one",
    ],
    "fault": [
        "{item} stopped working after {days} days",
        "{item} makes a loud noise and gets hot",
        "the screen of {item} stays black",
        "{item} will not charge any more",
        "there is a crack in {item}, it broke at first use",
        "{item} switches itself off every few minutes",
        "after the update {item} does not start",
    ],
    "praise": [
        "thank you, {item} is better than I hoped",
        "your colleague solved it within minutes",
        "{item} came {days} days early, well done",
        "I have told all my friends about {item}",
        "five stars for how you handled this",
        "the new page is a joy to use",
        "for {price} nothing beats {item}",
    ],
}
TOPICS = tuple(COMPLAINTS)

_ITEMS = (
    "the lamp", "the kettle", "the headset", "the desk chair", "the rain coat",
    "the router", "the toy train", "the watch", "the backpack", "the tablet",
)  # fmt: skip
_FIRST = """Ada Bela Cleo Dario Edda Faro Gita Hugo Ines Jaro Kira Levi Mona Nilo Orla Pavel Runa Silo Tova Ugo Vera
Wim Yara Zeno""".split()
_LAST = """Amberg Brook Castell Dorn Elmwood Farrow Gallin Hartley Ivers Jolander Kestrel Lindqvar Marlow Norbeck
Ostwin Pellam""".split()
_OPENINGS = ["Hello.", "Hi there!", "Good morning.", "To whom it may concern:", "Hey!", "", "", ""]
_LINKS = ["Also,", "By the way,", "Besides,", "Not the main thing, but", "As I wrote before,"]
_CONTACTS = [
    "Order {order}.",
    "My number is {order}.",
    "Write to {mail}.",
    "{name}, {mail}",
    "{name}",
    "Regards, {name}",
    "",
]


def _sentence(rng: random.Random, topic: str) -> str:
    template = rng.choice(COMPLAINTS[topic])
    price, days = f"{rng.randint(5, 400)} euros", rng.randint(2, 30)
    return template.format(item=rng.choice(_ITEMS), price=price, days=days)


def _contact(rng: random.Random) -> str:
    first, last, number = rng.choice(_FIRST), rng.choice(_LAST), rng.randint(10_000, 99_999)
    mail = f"{first}.{last}{number % 100}@example.com".lower()
    return rng.choice(_CONTACTS).format(order=f"#{number}", mail=mail, name=f"{first} {last}")


def generate(count: int, seed: int = 0, aside: float = 1 / 3) -> list[Ticket]:
    """Make `count` tickets, the same ones for the same seed; a share of `aside` mentions a second topic.

    >>> tickets = generate(4000)
    >>> tickets == generate(4000), tickets == generate(4000, seed=1)
    (True, False)
    >>> generate(2)[1].text
    '...'
    """
    rng = random.Random(f"tickets {seed}")  # the data is public and synthetic: no secret randomness needed
    tickets = []
    for _ in range(count):
        label = rng.randrange(len(TOPICS))
        sentences = [_sentence(rng, TOPICS[label])]
        if rng.random() < aside:
            sentences.append(f"{rng.choice(_LINKS)} {_sentence(rng, rng.choice(TOPICS))}")
            if rng.random() < 1 / 5:  # some mention the main topic last
                sentences.reverse()
        parts = [rng.choice(_OPENINGS), *(f"{text[0].upper()}{text[1:]}." for text in sentences), _contact(rng)]
        tickets.append(Ticket(" ".join(part for part in parts if part), label))
    return tickets
