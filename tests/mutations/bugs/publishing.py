"""Bugs put into `hf_private/publishing`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "weights of any size keep verify busy",
        "publishing/snapshot.py",
        (("and time.process_time() < end:", "and time.process_time() < end + 9:"),),
        "tests/publishing/test_forged_cards.py::test_weights_of_any_size_take_no_longer",
    ),
    Mutant(
        "a claim of zero-concentrated differential privacy is no claim",
        "publishing/claims.py",
        (("yield from _of_other_notion(plain, tokens, index)", "yield from ()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: zCDP-0.1.0]",
    ),
    Mutant(
        "copies of the data are pushed, if they have a name that nobody thought of",
        "publishing/release.py",
        (("if not is_published(name):", "if False:"),),
        "tests/publishing/test_release.py::test_every_file_is_decided_by_name",
    ),
    Mutant(
        "the ledger is published",
        "publishing/release.py",
        (
            ('    "_*": "local: the ledger and work files",\n', ""),
            ('    "ledger*.jsonl": "the ledger\'s detail: when each step ran",\n', ""),
            ('    "*.jsonl": "a copy of data",\n', ""),
        ),
        "tests/publishing/test_release.py::test_every_file_is_decided_by_name",
    ),
    Mutant(
        "a card of an unknown version is believed",
        "publishing/recompute.py",
        (("if not known:", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[version: unknown, other words-0.1.0]",
    ),
    Mutant(
        "weights in another format pass as those of the claim",
        "publishing/verify.py",
        (("if may_hold_weights(name)}", "if False}"),),
        "tests/publishing/test_forged_cards.py::test_weights_in_another_format_have_no_claim[model.gguf]",
    ),
    Mutant(
        "an old card is compared with new words",
        "publishing/template_versions.py",
        (("return known[-1] if known else None", "return _folders()[-1]"),),
        "tests/publishing/test_forged_cards.py::test_an_old_card_is_held_to_the_old_words",
    ),
    Mutant(
        "privacy.json with two values of one key",
        "publishing/schema.py",
        (("if key in found:", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[json: key twice-0.1.0]",
    ),
    Mutant(
        "metadata with two values of one key",
        "publishing/card_check.py",
        (("if times > 1:", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[metadata: our key twice-0.1.0]",
    ),
    Mutant(
        "claims in a card's metadata are not looked for",
        "publishing/card_check.py",
        (('yield from _judge("metadata", "\\n\\n".join(metadata), statement)', "yield from ()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[metadata: nested-0.1.0]",
    ),
    Mutant(
        "claims in a card's prose are not looked for",
        "publishing/card_check.py",
        (('yield from _judge("prose", parts.rest, statement)', "yield from ()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: equals-0.1.0]",
    ),
    Mutant(
        "claims in names that the section prints are not looked for",
        "publishing/card_check.py",
        (
            (
                'yield from _judge(f"facts of {STATEMENT}", "\\n\\n".join(_printed_facts(statement)), statement)',
                "yield from ()",
            ),
        ),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[fact: optimizer, as a name-0.1.0]",
    ),
    Mutant(
        "a better delta is not a claim",
        "publishing/card_check.py",
        (("return claim.value < delta * (1 - 1e-9)", "return False"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: delta-0.1.0]",
    ),
    Mutant(
        "a privacy section that nobody sees",
        "publishing/card_check.py",
        (("if _is_hidden(parts.before):", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[hiding: in a code block-0.1.0]",
    ),
    Mutant(
        "a claim in HTML entities",
        "publishing/plain_text.py",
        (("html.unescape(html.unescape(text))", "text"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: numeric html entity-0.1.0]",
    ),
    Mutant(
        "a claim in LaTeX",
        "publishing/plain_text.py",
        (('LATEX_SYMBOLS.get(found[1], " ")', '" "'),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: latex-0.1.0]",
    ),
    Mutant(
        "a claim in look-alike letters",
        "publishing/plain_text.py",
        ((".casefold().translate(LOOK_ALIKES)", ".casefold()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: cyrillic letter-0.1.0]",
    ),
    Mutant(
        "a claim in a table",
        "publishing/claims.py",
        (("yield from _in_tables(plain)", "yield from ()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: table column-0.1.0]",
    ),
    Mutant(
        "a claim in words",
        "publishing/claims.py",
        (("words = _number_in_words(tokens, place)", "words = None"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: in words-0.1.0]",
    ),
    Mutant(
        "a claim without the word epsilon",
        "publishing/claims.py",
        (("yield from _before_dp(plain, tokens, index)", "yield from ()"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: n-DP-0.1.0]",
    ),
    Mutant(
        "Adam's epsilon is taken for a claim",
        "publishing/claims.py",
        (('return "numerical"', 'return "privacy"'),),
        "tests/publishing/test_forged_cards.py::test_honest_prose_passes[Adam]",
    ),
    Mutant(
        "a stranger's file keeps verify busy for hours",
        "publishing/recompute.py",
        (("if worker.is_alive() and time.process_time() - start > seconds:", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_time_limit_ends_in_cannot_tell",
    ),
    Mutant(
        "files that are called like a vocabulary are published",
        "publishing/release.py",
        (("return file in PUBLISHED or", 'return file in PUBLISHED or file.endswith("vocab.json") or'),),
        "tests/publishing/test_release.py::test_every_file_is_decided_by_name",
    ),
    Mutant(
        "a report gives attack rates of a run that is not private",
        "publishing/report/content.py",
        (("found = statement_risk(statement) if status == PRIVATE else None", "found = statement_risk(statement)"),),
        "tests/publishing/test_report.py::test_not_private_is_said_in_red_and_nothing_is_claimed",
    ),
    Mutant(
        "a report does not charge the runs that were tried",
        "spending/statement.py",
        (("group_size(settings), runs=runs, law=law)", "group_size(settings))"),),
        "tests/publishing/test_report.py::test_tuning_and_groups_are_charged_in_the_attack_rates",
    ),
    Mutant(
        "a report believes a claim that is wrong",
        "publishing/report/content.py",
        (("    elif wrong:\n", "    elif not wrong and False:\n"),),
        "tests/publishing/test_report.py::test_a_wrong_claim_is_said_in_red",
    ),
    Mutant(
        "a report rounds attack rates down",
        "publishing/rounding.py",
        (("math.ceil(share *", "math.floor(share *"),),
        "tests/publishing/test_report.py::test_golden_attack_rates_are_shown",
    ),
    Mutant(
        "text of a statement is markup in the report",
        "publishing/report/page.py",
        (("<td>{escape(one.text)}{blank}</td>", "<td>{one.text}{blank}</td>"),),
        "tests/publishing/test_report.py::test_text_of_a_statement_stays_text",
    ),
)
