"""Bugs put into `hf_private/spending`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "a ledger that was replaced while it is open is written to",
        "spending/ledger.py",
        (("if os.fstat(file.fileno()).st_size != self._end:", "if False:"),),
        "tests/spending/test_ledger_damage.py::test_a_ledger_that_is_replaced_while_it_is_open_is_not_written_to",
    ),
    Mutant(
        "an earlier ledger that is put back lowers the card's epsilon",
        "spending/spending.py",
        (("if self._closed is not None and not found.contains(", "if False and not found.contains("),),
        "tests/spending/test_bound_to_weights.py::test_a_ledger_that_was_put_back_after_the_run_gives_no_card",
    ),
    Mutant(
        "a model that was moved away from its record begins anew",
        "spending/lineage.py",
        (("if hasattr(config, MARK) and not any(", "if False and not any("),),
        "tests/spending/test_lineage.py::test_a_trained_model_that_was_moved_or_saved_by_hand_is_refused",
    ),
    Mutant(
        "a trained encoder inside another model begins anew",
        "spending/lineage.py",
        (("(config is None or hasattr(own, MARK))", "config is None"),),
        "tests/spending/test_lineage.py::test_a_trained_model_that_is_a_part_of_another",
    ),
    Mutant(
        "what was trained cannot be saved once the output folder is gone",
        "spending/spending.py",
        (("            return self._closed\n", "            return None\n"),),
        "tests/spending/test_lineage_cards.py::test_no_training_is_lost_because_a_folder_has_vanished",
    ),
    Mutant(
        "an adapter that is loaded onto a model of this process starts from zero",
        "spending/lineage.py",
        (("() if settled else _check", "() if settled or trainings(model) else _check"),),
        "tests/spending/test_lineage.py::test_a_trained_adapter_that_is_loaded_beside_others",
    ),
    Mutant(
        "a trained IA3 adapter starts from zero",
        "spending/lineage.py",
        ((', "IA3": getattr(config, "init_ia3_weights", 0)', ""),),
        "tests/spending/test_lineage.py::test_a_trained_adapter_of_another_kind_must_be_named",
    ),
    Mutant(
        "nothing is said of an adapter that does not show its past",
        "spending/lineage.py",
        (('unchecked = ("adapter_unchecked",)', "pass"),),
        "tests/spending/test_lineage.py::test_an_adapter_that_shows_nothing_is_admitted",
    ),
    Mutant(
        "what was set aside as other people's is forgotten when they come again",
        "spending/costs.py",
        (('[cost_of(statement), *left_out(statement.get("runs") or ())]', "[cost_of(statement)]"),),
        "tests/spending/test_lineage_cards.py::test_what_was_set_aside_is_charged_when_the_same_people_come_again",
    ),
    Mutant(
        "what was set aside is forgotten in the folder that has set it aside",
        "spending/costs.py",
        ((" for cost in all_costs(statement)] + left_out(own_runs)", " for cost in all_costs(statement)]"),),
        "tests/spending/test_lineage_cards.py::test_what_was_set_aside_is_charged_to_a_later_run_of_the_same_folder",
    ),
    Mutant(
        "the runs that were tried for a base model are forgotten",
        "spending/costs.py",
        (("    return math.ceil(runs)\n", "    return 1\n"),),
        "tests/spending/test_lineage_cards.py::test_the_charge_for_tuning_goes_along_with_the_weights",
    ),
    Mutant(
        "what a base model's card admits is not on those of its descendants",
        "spending/costs.py",
        (("return {**cost, **admitted(statement)}", "return cost"),),
        "tests/spending/test_lineage_cards.py::test_all_that_a_base_models_card_admits_is_on_those_of_its_descendants",
    ),
    Mutant(
        "a resumed run forgets the steps after its checkpoint",
        "spending/spending.py",
        (
            (
                "        with PrivacyLedger(self.folder / LEDGER, create=checkpoint is None) as ledger:",
                "        if checkpoint is not None:\n"
                "            (self.folder / LEDGER).write_bytes(Path(checkpoint, LEDGER).read_bytes())\n"
                "        with PrivacyLedger(self.folder / LEDGER, create=checkpoint is None) as ledger:",
            ),
        ),
        "tests/spending/test_spending.py::test_lost_steps_are_charged_and_the_rest_gets_more_noise",
    ),
    Mutant(
        "a second run starts from zero",
        "spending/spending.py",
        (
            (
                "        with PrivacyLedger(self.folder / LEDGER, create=checkpoint is None) as ledger:",
                "        (self.folder / LEDGER).unlink(missing_ok=True)\n"
                "        with PrivacyLedger(self.folder / LEDGER) as ledger:",
            ),
        ),
        "tests/spending/test_spending.py::test_epsilon_never_falls",
    ),
    Mutant(
        "the budget is checked after it is overspent",
        "spending/run.py",
        (("if self.steps_left < event.steps:", "if self.steps_left < 0:"),),
        "tests/spending/test_spending.py::test_no_step_beyond_the_plan_and_no_other_step",
    ),
    Mutant(
        "the base model's spending is forgotten",
        "spending/costs.py",
        (("    for cost in owed:\n", "    for cost in ():\n"),),
        "tests/spending/test_spending.py::test_the_base_models_spending_is_taken_over_once",
    ),
    Mutant(
        "a model that was trained into another output folder starts from zero",
        "spending/lineage.py",
        (("    found = [training.statement for training in trainings(model)]\n", "    found = []\n"),),
        "tests/spending/test_lineage.py::test_a_model_that_another_trainer_has_trained",
    ),
    Mutant(
        "a trained adapter starts from zero",
        "spending/lineage.py",
        (("elif fresh is not None and not values.is_meta", "elif False and not values.is_meta"),),
        "tests/spending/test_lineage.py::test_a_trained_adapter_must_be_named",
    ),
    Mutant(
        "live epsilon leaves out what was spent before",
        "spending/spending.py",
        (("                ledger.events,\n", "                (),\n"),),
        "tests/spending/test_spending.py::test_live_epsilon_climbs_to_the_final_one",
    ),
    Mutant(
        "a line that a crash left unfinished is not charged",
        "spending/ledger.py",
        (("if self.unfinished and self._chain.event is not None:", "if False:"),),
        "tests/spending/test_ledger_damage.py::test_torn_at_every_byte",
    ),
    Mutant(
        "epsilon rounded to the nearest, not up",
        "spending/statement.py",
        (("scaleb(last), rounding=ROUND_CEILING)", "scaleb(last))"),),
        "tests/publishing/test_card.py::test_epsilon_is_rounded_up_and_not_far",
    ),
    Mutant(
        "the card shows the last run's noise, and not the weaker one before it",
        "spending/statement.py",
        (('noise = admitted(facts).get("noise", "secure")', 'noise = settings["noise"]'),),
        "tests/publishing/test_card.py::test_a_phase_does_not_hide_what_an_earlier_one_had_to_admit[run]",
    ),
    Mutant(
        "1.999 runs are charged as one",
        "spending/statement.py",
        (('integer_at_least(1, **{"tuning.runs": runs})', "runs = int(runs)"),),
        "tests/publishing/test_forged_cards.py::test_only_whole_runs_are_charged[1.999]",
    ),
    Mutant(
        "a trained parameter is forgotten where it is moved to",
        "spending/registry.py",
        (("training for p in parameters_of(model) for", "training for p in parameters_of(model)[-2:] for"),),
        "tests/spending/test_bound_to_weights.py::test_a_part_that_is_moved_into_another_model_brings_its_spending",
    ),
    Mutant(
        "a run forgets what another trainer did inside it",
        "spending/registry.py",
        (("if one not in replaced), training", "if one is training), training"),),
        "tests/spending/test_bound_to_weights.py::test_a_trainer_inside_a_callback_of_another[True-on_train_begin]",
    ),
    Mutant(
        "weights that were loaded by hand begin anew",
        "spending/registry.py",
        (("        if cost:\n", "        if False:\n"),),
        "tests/spending/test_bound_to_weights.py::test_weights_that_are_loaded_by_hand_in_this_process_bring_their_spending",
    ),
    Mutant(
        "the mark of a part is hidden by the config of the whole",
        "spending/lineage.py",
        (("origin = (*_name_and_commit(config), hasattr(config, MARK))", "origin = _name_and_commit(config)"),),
        "tests/spending/test_bound_to_weights.py::test_a_changed_copy_of_a_part_is_refused",
    ),
    Mutant(
        "weights that were changed after the run are saved",
        "spending/fingerprints.py",
        (("if name not in self.expected or fingerprint(x) != self.expected[name]:", "if name not in self.expected:"),),
        "tests/spending/test_bound_to_weights.py::test_any_change_by_hand_is_noticed[False-scale_one_element]",
    ),
    Mutant(
        "what came to a model after the run is saved",
        "spending/fingerprints.py",
        (
            (
                "if name not in self.expected or fingerprint(x) != self.expected[name]:",
                "if fingerprint(x) != self.expected.get(name, fingerprint(x)):",
            ),
        ),
        "tests/spending/test_bound_to_weights.py::test_any_change_by_hand_is_noticed[False-add_buffer]",
    ),
    Mutant(
        "weights may be trained between two private steps",
        "spending/fingerprints.py",
        (("        return None if same else next(", "        return None if True else next("),),
        "tests/spending/test_bound_to_weights.py::test_training_without_privacy_inside_a_callback[on_step_end]",
    ),
    Mutant(
        "single elements may be written to between steps",
        "spending/fingerprints.py",
        (("(bits.sum(dtype=bits.dtype))", "(bits.flatten()[0])"),),
        "tests/spending/test_bound_to_weights.py"
        "::test_a_single_element_that_a_callback_writes_to_is_noticed_in_the_run",
    ),
    Mutant(
        "frozen weights may change in a run",
        "spending/fingerprints.py",
        (("for name in self.trained & tensors.keys():", "for name in self.start.keys() & tensors.keys():"),),
        "tests/spending/test_bound_to_weights.py::test_a_frozen_weight_that_a_callback_writes_to_is_not_saved",
    ),
    Mutant(
        "buffers are not compared with their start",
        "spending/fingerprints.py",
        (("if start is not None and fingerprint(x)", "if False and fingerprint(x)"),),
        "tests/spending/test_bound_to_weights.py::test_a_buffer_that_training_writes_to_is_not_saved[at the end]",
    ),
    Mutant(
        "what was declared after a run is not on the cards of descendants",
        "spending/admissions.py",
        (('        declared.update(one.get("post_processing") or ())\n', ""),),
        "tests/spending/test_bound_to_weights.py::test_what_was_declared_is_on_the_cards_of_descendants",
    ),
    Mutant(
        "what was declared after a run is not on its card",
        "spending/admissions.py",
        (('("anchors", "carriers", "noise", "post_processing")', '("anchors", "carriers", "noise")'),),
        "tests/spending/test_bound_to_weights.py::test_what_was_declared_is_on_the_cards_of_descendants",
    ),
    Mutant(
        "a loaded model that was changed gets the card of its folder",
        "spending/fingerprints.py",
        (
            (
                "if key in stored and fingerprint(file.get_tensor(key).to(x.dtype)) == fingerprint(x):",
                "if key in stored:",
            ),
        ),
        "tests/spending/test_bound_to_weights.py"
        "::test_a_loaded_model_that_was_changed_does_not_get_the_card_of_its_folder[whole]",
    ),
    Mutant(
        "drawn records are priced as if the unit were clipped as one",
        "spending/stated_unit.py",
        (('settings.get("unit_sampling") == "units"', "True"),),
        "tests/trainer/test_units.py::test_drawn_records_cost_what_a_group_costs",
    ),
    Mutant(
        "a model is continued with another unit",
        "spending/stated_unit.py",
        (("            if other != own:", "            if False:"),),
        "tests/trainer/test_units.py::test_a_model_is_continued_with_the_same_unit_only",
    ),
    Mutant(
        "a budget of an attacker's advantage permits any number of steps",
        "spending/limits.py",
        (("return None if target_risk is None else RiskLimit(target_risk, records_per_unit)", "return None"),),
        "tests/spending/test_limits.py::test_which_limit_the_settings_name",
    ),
    Mutant(
        "a budget of an attacker's advantage forgets earlier runs",
        "spending/limits.py",
        (
            (
                "calibrate_risk(self.target, sample_rate, steps, spent,",
                "calibrate_risk(self.target, sample_rate, steps, (),",
            ),
        ),
        "tests/spending/test_limits.py::test_a_spent_budget_is_closed_until_it_is_raised",
    ),
    Mutant(
        "a budget of an attacker's advantage counts one record of a person",
        "spending/limits.py",
        (
            (
                "calibrate_risk(self.target, sample_rate, steps, spent, self.records_per_unit, tick",
                "calibrate_risk(self.target, sample_rate, steps, spent, tick",
            ),
        ),
        "tests/spending/test_limits.py::test_people_with_several_records_are_priced_as_such",
    ),
)
