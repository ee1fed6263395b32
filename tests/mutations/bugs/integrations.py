"""Bugs of the integrations with other libraries."""

from tests.mutations.mutant import Mutant

PAIRS = "tests/integrations/trl/test_pairs.py::"
SFT = "tests/integrations/trl/test_sft.py::"
LONG = "tests/integrations/trl/test_too_long.py::"

MUTANTS = (
    Mutant(
        "the sides of a preference pair are two records",
        "integrations/trl/pairs.py",
        (("    rows_per_record = SIDES\n", "    rows_per_record = 1\n"),),
        PAIRS + "test_the_sides_of_a_pair_are_clipped_as_one[dpo]",
    ),
    Mutant(
        "the sides of a pair are those of two pairs",
        "integrations/trl/pairs.py",
        (("value.unflatten(0, (SIDES, size)).transpose(0, 1)", "value.unflatten(0, (size, SIDES))"),),
        PAIRS + "test_the_loss_of_a_pair_is_trls[sigmoid]",
    ),
    Mutant(
        "a preference loss is a mean over the batch",
        "integrations/trl/dpo.py",
        (
            (
                "        return torch.stack(terms).sum(0)\n",
                "        return torch.stack(terms).sum(0).mean().expand(chosen.shape)\n",
            ),
        ),
        PAIRS + "test_the_dpo_update_is_that_of_a_for_loop[False]",
    ),
    Mutant(
        "the reference has the adapter",
        "integrations/trl/dpo.py",
        (
            ('use_adapter(model, "ref" if "ref" in model.peft_config else None)', "nullcontext()"),
            (
                "import AbstractContextManager, contextmanager",
                "import AbstractContextManager, contextmanager, nullcontext",
            ),
        ),
        PAIRS + "test_the_dpo_update_is_that_of_a_for_loop[True]",
    ),
    Mutant(
        "losses that sort the batch are losses of a pair",
        "integrations/trl/dpo.py",
        (("[name for name in args.loss_type if name not in OBJECTIVES]", "[]"),),
        PAIRS + "test_what_is_not_a_loss_of_one_pair_is_refused[loss_type-settings0]",
    ),
    Mutant(
        "the past of a reference is free",
        "integrations/trl/dpo.py",
        (("        self._check_reference()\n", ""),),
        PAIRS + "test_a_reference_with_a_private_past_of_its_own_is_refused",
    ),
    Mutant(
        "metrics that TRL adds to a log entry pass",
        "trainer/log_filter.py",
        (("or (self._training and not listed)", ""),),
        SFT + "test_metrics_of_training_tokens_reach_no_log",
    ),
    Mutant(
        "packing reaches TRL",
        "integrations/trl/settings.py",
        (('in ("packing", "padding_free", "use_liger_kernel")', 'in ("use_liger_kernel",)'),),
        SFT + "test_what_couples_records_is_refused_before_the_dataset_is_read[packing-settings0]",
    ),
    Mutant(
        "the load-balancing loss stays on",
        "integrations/trl/sft.py",
        (("        refuse_experts(self)\n", ""),),
        SFT + "test_the_load_balancing_loss_is_refused",
    ),
    Mutant(
        "a warning quotes a record",
        "integrations/trl/preparation.py",
        (("        logger.addFilter(_cut)\n", "        pass\n"),),
        SFT + "test_no_record_is_quoted_in_the_log",
    ),
    Mutant(
        "rows of a pair in a unit are units of their own",
        "mechanism/step.py",
        (("part.rows * rows_of_loss", "rows_of_loss"),),
        PAIRS + "test_units_of_several_pairs_are_clipped_as_one",
    ),
    Mutant(
        "online methods pass",
        "trainer/refusals.py",
        (('        lambda a: hasattr(a, "num_generations"),\n', "        lambda a: False,\n"),),
        "tests/integrations/test_trl_optional.py::test_online_methods_are_refused_for_any_trainer_class",
    ),
    Mutant(
        "TRL: records that are too long are missing from the public count",
        "integrations/trl/preparation.py",
        (("    if not missing:\n", "    if True:\n"),),
        LONG + "test_the_statement_does_not_tell_how_many_there_were[DPSFTTrainer]",
    ),
    Mutant(
        "TRL: units of records that are too long are lost",
        "integrations/trl/preparation.py",
        (("else dataset[row][name] for", "else dataset[0][name] for"),),
        LONG + "test_the_statement_does_not_tell_how_many_there_were[DPDPOTrainer]",
    ),
)
