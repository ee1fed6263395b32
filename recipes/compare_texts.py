"""Compare synthetic text with private text. The output is NOT PRIVATE: only the data holder may see it.

    python recipes/compare_texts.py outputs/synthetic/synthetic --private_file notes.jsonl --test_file other.jsonl \\
        --text_column note --label_column ward

A classifier (words and pairs of words, logistic regression) is trained on the synthetic texts and one on the private
ones; both are tested on texts of other people. A third one gets as many private texts as there are synthetic ones,
chosen at random. Further: lengths, vocabulary, texts that are in both, and the longest
passage that both have, beside the same for the test texts, which shows how much recurs by chance. Nothing is written
to a file, since these numbers depend on the private records without noise.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import data
from datasets import load_from_disk
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

Words = tuple[str, ...]
Texts = list[dict[str, str]]  # each with its label
HEADING = "NOT PRIVATE, do not publish:"


def words_of(records: Texts, text: str) -> list[Words]:
    """Lower-case words of each text."""
    return [tuple(record[text].lower().split()) for record in records]


def accuracy(texts: Sequence[str], labels: Sequence[str], test: Sequence[str], wanted: Sequence[str]) -> float:
    """Share of the test texts that a classifier gets right which has learned from `texts`."""
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), min_df=2), LogisticRegression(C=10.0, max_iter=300))
    model.fit(texts, labels)
    return float(model.score(test, wanted))


def longest_shared_passage(ours: Sequence[Words], theirs: Sequence[Words]) -> int:
    """Most consecutive words that a text of `ours` and one of `theirs` both have.

    >>> longest_shared_passage([("a", "b", "c")], [("x", "b", "c"), ("c", "d")])
    2
    """

    def passages(texts: Sequence[Words], length: int) -> set[Words]:
        return {text[at : at + length] for text in texts for at in range(len(text) - length + 1)}

    length = 0
    while passages(ours, length + 1) & passages(theirs, length + 1):
        length += 1
    return length


def likeness(texts: Sequence[Words], private: Sequence[Words]) -> dict[str, float]:
    """Lengths and vocabulary of `texts`, and what they share with the private texts."""
    vocabulary = {word for text in texts for word in text}
    known = {word for text in private for word in text}
    whole = set(private)
    return {
        "texts": len(texts),
        "words_per_text": sum(map(len, texts)) / len(texts),
        "vocabulary": len(vocabulary),
        "share_of_private_vocabulary": len(vocabulary & known) / len(known),
        "share_of_texts_that_are_private_texts": sum(text in whole for text in texts) / len(texts),
        "longest_shared_passage": longest_shared_passage(texts, private),
    }


def compare(
    synthetic: Mapping[str, Texts], private: Texts, test: Texts, text: str = "text", label: str = "label"
) -> dict[str, dict[str, float]]:
    """The scores of each set of synthetic texts, of the private ones (`private`) and of those of others (`test`)."""
    known = {record[label] for records in (*synthetic.values(), private) for record in records}
    test = [record for record in test if record[label] in known]
    own = words_of(private, text)

    def score(records: Texts) -> float:
        asked, wanted = ([record[name] for record in test] for name in (text, label))
        return accuracy([record[text] for record in records], [record[label] for record in records], asked, wanted)

    sizes = {len(records): min(len(records), len(private)) for records in synthetic.values()}
    as_many = {size: score(random.Random(0).sample(private, drawn)) for size, drawn in sizes.items()}
    found = {"private": likeness(own, own) | {"accuracy": score(private)}, "test": likeness(words_of(test, text), own)}
    for name, records in synthetic.items():
        found[name] = likeness(words_of(records, text), own) | {"accuracy": score(records)}
        found[name]["share_of_accuracy"] = found[name]["accuracy"] / found["private"]["accuracy"]
        found[name]["accuracy_of_as_many_private_texts"] = as_many[len(records)]
    return found


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("synthetic", type=Path, help="folder of synthesize.py, `datasets` format")
    parser.add_argument("--private_file", type=Path, required=True, help="the private records: JSON lines or CSV")
    parser.add_argument("--test_file", type=Path, required=True, help="records of other people")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--label_column", default="label", help="what the classifiers predict")
    options = parser.parse_args(argv)
    found = compare(
        {"synthetic": load_from_disk(str(options.synthetic)).to_list()},
        data.read(options.private_file),
        data.read(options.test_file),
        options.text_column,
        options.label_column,
    )
    print(HEADING)
    print(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    main()
