"""The page of the language results says what was found, and which goal was missed."""

import language_table

SCORES = {"texts": 20_000, "accuracy": 0.6, "share_of_accuracy": 0.75}


def test_the_page_has_what_is_there() -> None:
    run = {"perplexity": 12.345, "answers": ["User: Hi", "Assistant: Hello"]}
    page = language_table.markdown({"epsilon 8": run})
    assert "| epsilon 8 | 12.35 |" in page and "- Assistant: Hello" in page and "Synthetic" not in page


def test_a_goal_that_was_missed_is_named() -> None:
    turns = {
        "synthetic": SCORES,
        "untuned": {"texts": 20_000, "accuracy": 0.1, "share_of_accuracy": 0.125},
        "private": {"texts": 9, "accuracy": 0.8},
        "test": {"texts": 3},
        "synthetic_shown": ["Music: x"],
        "untuned_shown": ["Music: y"],
    }
    page = language_table.markdown({"turns": turns})
    assert "**75.0%**" in page and "not reached" in page and "| accuracy | 0.6 | 0.1 | 0.8 |  |" in page
    met = {**turns, "synthetic": {**SCORES, "share_of_accuracy": 0.85}}
    assert "85%, reached" in language_table.markdown({"turns": met})
