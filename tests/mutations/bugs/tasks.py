"""Bugs put into `hf_private/tasks`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "rows of one table that stand in a dataset several times count once",
        "tasks/repeats.py",
        (("key = buffers[0].address if buffers else (id(chunk), next(self._numbers))", "key = next(self._numbers)"),),
        "tests/tasks/test_repeats.py::test_repeated_records_are_counted[concatenate_datasets]",
    ),
    Mutant(
        "a collator spreads the largest number of a batch, and one record is looked at",
        "tasks/collators.py",
        (("enumerate(_turns(one, equal)):", "enumerate([(one, equal)]):"),),
        "tests/trainer/test_late_changes.py::test_inputs_that_a_subclass_mixes_are_refused",
    ),
    Mutant(
        "the losses of an empty mask count",
        "tasks/losses.py",
        (("return losses if empty is None else losses.where(~empty, 0)", "return losses"),),
        "tests/tasks/test_attacks.py::test_a_record_with_an_empty_mask_contributes_nothing",
    ),
    Mutant(
        "a collator may split a record into rows, each clipped by itself, or pack several into one",
        "tasks/micro_batches.py",
        (("if shape and shape[0] != len(records) and", "if False and"),),
        "tests/trainer/test_guards.py::test_a_row_must_be_a_record[0-splitting]",
    ),
    Mutant(
        "loss averaged over the padded length, which the longest neighbour decides",
        "tasks/head_losses.py",
        (("/ (labels != IGNORE_INDEX).sum(-1).clamp(min=1)", "/ labels.shape[-1]"),),
        "tests/tasks/test_losses.py::test_padding_changes_nothing[gpt2]",
    ),
    Mutant(
        "loss averaged over all tokens of the batch, as Transformers does",
        "tasks/head_losses.py",
        (("/ (labels != IGNORE_INDEX).sum(-1).clamp(min=1)", "/ (labels != IGNORE_INDEX).sum().clamp(min=1)"),),
        "tests/tasks/test_losses.py::test_replacing_a_record_changes_no_other_loss[gpt2]",
    ),
    Mutant(
        "left padding is let in",
        "tasks/independence.py",
        (("if bool((real[..., 1:] & ~real[..., :-1]).any()):", "if False:"),),
        "tests/tasks/test_refusals.py::test_batches_that_are_refused",
    ),
    Mutant(
        "padding that nothing marks counts as text, as much of it as the longest neighbour asks for",
        "tasks/micro_batches.py",
        (("            refuse_unmarked_padding(records, batch)\n", ""),),
        "tests/trainer/test_guards.py::test_padding_must_be_marked_and_nothing_flattened",
    ),
    Mutant(
        "padding of vectors or images that nothing marks counts as content",
        "tasks/micro_batches.py",
        (("            if not any(_grows(", "            if False and not any(_grows("),),
        "tests/trainer/test_guards.py::test_padding_of_what_is_not_tokens_must_be_marked_too",
    ),
    Mutant(
        "rotary embeddings turn with the longest record of a batch",
        "tasks/independence.py",
        (("        if length > limit:", "        if False:"),),
        "tests/tasks/test_independence.py::test_rope_that_depends_on_the_longest_record_is_refused_beyond_its_limit",
    ),
    Mutant(
        "collators are tested on records of one length only",
        "tasks/collators.py",
        (("        trial.check_lengths()\n", ""),),
        "tests/tasks/test_collators.py::test_tokens_made_in_the_collator_need_a_mask",
    ),
    Mutant(
        "collators are tested under one seed only",
        "tasks/collators.py",
        (("range(turn, SEEDS, TURNS)", "range(1)"),),
        "tests/tasks/test_collators.py::test_collators_that_couple_records_are_refused",
    ),
    Mutant(
        "a collator's error quotes a record",
        "tasks/collators.py",
        (("        ) from None\n", "        ) from error\n"),),
        "tests/tasks/test_collators.py::test_no_message_quotes_a_record",
    ),
    Mutant(
        "padding of records whose lengths nobody knows counts as text",
        "tasks/micro_batches.py",
        (("        _refuse_unknown_lengths(records, batch)\n", "        pass\n"),),
        "tests/tasks/test_collators.py::test_a_batch_of_unknown_lengths_needs_a_mask_at_every_step",
    ),
    Mutant(
        "a record with an empty mask sees as much padding as its neighbours ask for",
        "tasks/losses.py",
        (("return losses if empty is None else losses.where(~empty, 0)", "return losses"),),
        "tests/tasks/test_attacks.py::test_a_record_with_an_empty_mask_contributes_nothing",
    ),
    Mutant(
        "LLM.int8 chooses outlier columns over the whole batch",
        "tasks/independence.py",
        (("    if threshold > 0:\n", "    if False:\n"),),
        "tests/tasks/test_attacks.py::test_int8_with_outliers_is_refused",
    ),
    Mutant(
        "columns of a dataset are taken as valid",
        "tasks/dataset_check.py",
        (("        if not all(_fits(", "        if False and not all(_fits("),),
        "tests/trainer/test_attacks.py::test_labels_of_tokens_are_checked_too",
    ),
    Mutant(
        "a failing step quotes a label",
        "tasks/losses.py",
        (('in a batch of training records.") from None', 'in a batch of training records.")'),),
        "tests/trainer/test_attacks.py::test_what_fails_inside_a_step_names_the_field",
    ),
    Mutant(
        "a record whose unit is not known is a unit of its own",
        "tasks/unit_column.py",
        (("if value is None or not bool(value == value):", "if value is None:"),),
        "tests/tasks/test_unit_column.py::test_an_id_that_is_missing_or_not_comparable_is_refused_by_row[NaN]",
    ),
    Mutant(
        "an id and the same with a blank after it are two people",
        "tasks/unit_column.py",
        (("            if _is_padded(one):", "            if False:"),),
        "tests/tasks/test_unit_column.py::test_ids_with_blanks_around_them_are_refused_by_row",
    ),
    Mutant(
        "True and 1 are the same person",
        "tasks/unit_column.py",
        (("            if _kind(one) != kind:", "            if False:"),),
        "tests/tasks/test_unit_column.py::test_numbers_that_are_equal_but_of_two_types_are_refused",
    ),
    Mutant(
        "a unit may be in the training and in the evaluation data",
        "tasks/unit_column.py",
        (("            if shared is not None:", "            if False:"),),
        "tests/trainer/test_units.py::test_a_unit_in_training_and_evaluation_is_refused",
    ),
    Mutant(
        "the column of the unit reaches the collator",
        "tasks/unit_column.py",
        (("return collator if self.name is None else _Hidden(collator, self.name)", "return collator"),),
        "tests/trainer/test_units.py::test_the_column_reaches_neither_model_nor_collator[list, all columns]",
    ),
    Mutant(
        "a long neighbour makes a short record's gradient NaN (float64, sliding windows)",
        "tasks/independence.py",
        (("    if bool(blind):\n", "    if False:\n"),),
        "tests/tasks/test_refusals.py::test_padding_beyond_an_attention_window_is_refused_in_float64",
    ),
    Mutant(
        "a record with more rows than its collator declares counts as several",
        "tasks/unit_loss.py",
        (("if value.dim() < 2 or value.shape[1] != self.rows:", "if False:"),),
        "tests/trainer/test_rows_per_record.py::test_another_number_of_rows_than_declared_is_refused",
    ),
    Mutant(
        "the rows of a record are clipped one by one",
        "tasks/unit_loss.py",
        (("self.rows_per_record = rows * rows_per_record(loss)", "self.rows_per_record = rows_per_record(loss)"),),
        "tests/trainer/test_rows_per_record.py::test_the_gradient_of_a_record_is_that_of_the_mean_of_its_rows",
    ),
    Mutant(
        "4-bit weights that an evaluation packs, which gradients do not pass, are trained on",
        "tasks/packed_weights.py",
        (("            setattr(module, PACKS, False)\n", ""),),
        "tests/tasks/test_packed_weights.py::test_gradients_pass_after_an_evaluation",
    ),
)
