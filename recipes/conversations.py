"""Conversations of SGD (Schema-Guided Dialogue), split into public ones, private ones and ones for tests.

    # counts and hashes of the parts; files for synthesize.py: what users say in the private part and in the tests
    HF_PRIVATE_DATA=path/to/data python recipes/conversations.py --output_dir outputs/sgd

The private part is the whole training file: sft.py and synthesize.py fine-tune on it. The language model of
pretrain_tiny.py has seen none of it; it reads three quarters of the dev file, the public part, and the last quarter is
for tests. More than half of the conversations span several services, so the split is by conversation: a hash of its
number decides.

`$HF_PRIVATE_DATA/sgd/{train,dev}.tsv.gz` have a turn in each line, with the columns dialogue, turn, speaker (U or S),
service, intent and utterance.
"""

import argparse
import csv
import gzip
import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

ROLES = {"U": "user", "S": "assistant"}
PARTS = {"private": "train", "public": "dev", "test": "dev"}  # and their files
SERVICES = (  # of the training set, from the published schema
    "Banks", "Buses", "Calendar", "Events", "Flights", "Homes", "Hotels", "Media", "Movies", "Music", "RentalCars",
    "Restaurants", "RideSharing", "Services", "Travel", "Weather",
)  # fmt: skip

Turn = dict[str, str]


def is_test(dialogue: str) -> bool:
    """Whether a conversation of the dev file is for tests.

    >>> [is_test(f"1_{number:05}") for number in range(4)]
    [False, True, False, True]
    """
    return sha256(f"sgd {dialogue}".encode()).digest()[0] % 4 == 0


def turns(part: str, data_dir: str | None = None) -> list[Turn]:
    """The turns of one part, in the order of the file. Numbers recur in the other file and begin with its name."""
    folder, split = data_dir or os.environ.get("HF_PRIVATE_DATA", "."), PARTS[part]
    path = Path(folder, "sgd", f"{split}.tsv.gz")
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}: set HF_PRIVATE_DATA to a folder with SGD's turns.")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    chosen = [turn for turn in found if part == "private" or is_test(turn["dialogue"]) == (part == "test")]
    return [{**turn, "dialogue": f"{split} {turn['dialogue']}"} for turn in chosen]


def chats(found: Iterable[Turn]) -> dict[str, list[dict[str, str]]]:
    """The messages of each conversation, by its number.

    >>> chats([{"dialogue": "1", "speaker": "U", "utterance": "Hi"}])
    {'1': [{'role': 'user', 'content': 'Hi'}]}
    """
    messages: dict[str, list[dict[str, str]]] = {}
    for turn in found:
        said = {"role": ROLES[turn["speaker"]], "content": turn["utterance"]}
        messages.setdefault(turn["dialogue"], []).append(said)
    return messages


def digest(texts: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the texts, a line each.

    >>> digest(["Hello", "Bye"])
    '2a8821531296afc5'
    """
    total = sha256()
    for text in texts:
        total.update(f"{text}\n".encode())
    return total.hexdigest()[:16]


def write_user_turns(folder: Path) -> None:
    """What users say, a record each with its conversation and service, and the public list of services."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("private", "test"):
        said = [turn for turn in turns(part) if ROLES[turn["speaker"]] == "user"]
        records = [{"dialogue": t["dialogue"], "service": t["service"], "text": t["utterance"]} for t in said]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "services.json").write_text(json.dumps([{"service": name} for name in SERVICES]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, help="folder for files of user turns; default: none are written")
    folder = parser.parse_args(argv).output_dir
    seen = {}
    for part in PARTS:
        found = turns(part)
        seen[part] = {" ".join(said["content"] for said in chat) for chat in chats(found).values()}
        count = len({turn["dialogue"] for turn in found})
        hashed = digest(f"{turn['dialogue']} {turn['utterance']}" for turn in found)
        print(f"{part}: {count:,} conversations, {len(found):,} turns, sha256 {hashed}")
    for part in ("public", "test"):
        print(f"private conversations with the text of a {part} one: {len(seen['private'] & seen[part])}")
    if folder is not None:
        write_user_turns(folder)


if __name__ == "__main__":
    main()
