"""Conversations of SGD (Schema-Guided Dialogue), one half of them public and the other half private.

    # counts and hashes of both halves; files for synthesize.py: what users say in the private half and in dev
    HF_PRIVATE_DATA=path/to/data python recipes/conversations.py --output_dir outputs/sgd

The language model of pretrain_tiny.py is trained on the public half of the training conversations; sft.py and
synthesize.py fine-tune it on the private half. More than half of the conversations span several services, so the
split is by conversation: a hash of its number decides, and no turn of a private conversation is public. Both halves
come from one distribution, so the public one is as close to the private one as public text can be.

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
PARTS = ("public", "private")
SERVICES = (  # of the training set, from the published schema
    "Banks", "Buses", "Calendar", "Events", "Flights", "Homes", "Hotels", "Media", "Movies", "Music", "RentalCars",
    "Restaurants", "RideSharing", "Services", "Travel", "Weather",
)  # fmt: skip

Turn = dict[str, str]


def part_of(dialogue: str) -> str:
    """The half to which a training conversation belongs.

    >>> [part_of(f"1_{number:05}") for number in range(4)]
    ['public', 'public', 'private', 'public']
    """
    return PARTS[sha256(f"sgd {dialogue}".encode()).digest()[0] % 2]


def turns(split: str, part: str | None = None, data_dir: str | None = None) -> list[Turn]:
    """The turns of a split, of one of its halves or of both, in the order of the file."""
    folder = data_dir or os.environ.get("HF_PRIVATE_DATA", ".")
    path = Path(folder, "sgd", f"{split}.tsv.gz")
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}: set HF_PRIVATE_DATA to a folder with SGD's turns.")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [turn for turn in found if part in (None, part_of(turn["dialogue"]))]


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
    for split, part in (("train", "private"), ("dev", None)):
        said = [turn for turn in turns(split, part) if ROLES[turn["speaker"]] == "user"]
        records = [
            {"dialogue": f"{split} {t['dialogue']}", "service": t["service"], "text": t["utterance"]} for t in said
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "services.json").write_text(json.dumps([{"service": name} for name in SERVICES]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, help="folder for files of user turns; default: none are written")
    folder = parser.parse_args(argv).output_dir
    seen = {}
    for part in PARTS:
        found = turns("train", part)
        seen[part] = {" ".join(said["content"] for said in chat) for chat in chats(found).values()}
        count = len({turn["dialogue"] for turn in found})
        hashed = digest(f"{turn['dialogue']} {turn['utterance']}" for turn in found)
        print(f"{part}: {count:,} conversations, {len(found):,} turns, sha256 {hashed}")
    print(f"conversations with equal texts in both halves: {len(seen['public'] & seen['private'])}")
    if folder is not None:
        write_user_turns(folder)


if __name__ == "__main__":
    main()
