"""Compare synthetic text with private text. The output is NOT PRIVATE: only the data holder may see it.

    python recipes/compare_texts.py outputs/synthetic/synthetic --private_file notes.jsonl --test_file other.jsonl \\
        --text_column note --label_column ward

A classifier (words and pairs of words, logistic regression) is trained on the synthetic texts and one on the private
ones; both are tested on texts of other people. Further: lengths, vocabulary, texts that are in both, and the longest
passage that both have, beside the same for the test texts, which shows how much recurs by chance. Nothing is written
to a file, since these numbers depend on the private records without noise.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import data
from datasets import load_from_disk
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

Words = tuple[str, ...]
HEADING = "NOT PRIVATE, do not publish:"


def words_of(texts: Sequence[str]) -> list[Words]:
    """Lower-case words of each text."""
    return [tuple(text.lower().split()) for text in texts]


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


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("synthetic", type=Path, help="folder of synthesize.py, `datasets` format")
    parser.add_argument("--private_file", type=Path, required=True, help="the private records: JSON lines or CSV")
    parser.add_argument("--test_file", type=Path, required=True, help="records of other people")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--label_column", default="label", help="what the classifiers predict")
    options = parser.parse_args(argv)
    text, label = options.text_column, options.label_column
    made = load_from_disk(str(options.synthetic))
    private, test = data.read(options.private_file), data.read(options.test_file)
    known = set(made[label]) | {record[label] for record in private}
    test = [record for record in test if record[label] in known]
    asked, wanted = [record[text] for record in test], [record[label] for record in test]
    sources = {
        "synthetic": (made[text], made[label]),
        "private": ([record[text] for record in private], [record[label] for record in private]),
    }
    own = words_of(sources["private"][0])
    found = {}
    for name, (texts, labels) in sources.items():
        found[name] = likeness(words_of(texts), own) | {"accuracy": accuracy(list(texts), list(labels), asked, wanted)}
    found["test"] = likeness(words_of(asked), own)
    found["synthetic"]["share_of_accuracy"] = found["synthetic"]["accuracy"] / found["private"]["accuracy"]
    print(HEADING)
    print(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    main()
