"""Bugs put into `hf_private/trainer`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "an error of the user's code is quoted",
        "trainer/data_guards.py",
        (("if _is_ours(error) else", "if isinstance(error, ValueError) else"),),
        "tests/trainer/test_attacks.py::test_an_error_of_the_users_code_is_not_quoted",
    ),
    Mutant(
        "what was charged is lost if an evaluation fails",
        "trainer/training_run.py",
        (("                        save_after_error(self, self._first_step)\n", "                        pass\n"),),
        "tests/trainer/test_interruption.py::test_an_error_leaves_a_checkpoint_behind[evaluation]",
    ),
    Mutant(
        "an optimizer brings momentum of gradients without noise",
        "trainer/guards.py",
        (("    if first and any(", "    if False and any("),),
        "tests/trainer/test_guards.py::test_an_optimizer_that_has_taken_steps_is_refused",
    ),
    Mutant(
        "a frozen weight gets a gradient without noise",
        "trainer/guards.py",
        (
            (
                "for name, p in trainable(model).items() if p.grad is not None}\n        self._seen",
                "for name, p in model.named_parameters() if p.grad is not None}\n        self._seen",
            ),
        ),
        "tests/trainer/test_guards.py::test_a_gradient_of_a_frozen_weight_stops_the_step",
    ),
    Mutant(
        "what training writes into the settings of generation is saved",
        "trainer/saved_texts.py",
        (('("config", "generation_config")', '("config",)'),),
        "tests/spending/test_bound_to_weights.py::test_data_in_a_file_beside_the_weights_is_not_saved[generation]",
    ),
    Mutant(
        "what training writes into a tokenizer's settings is saved",
        "trainer/saved_texts.py",
        (("        yield from ((name, repr(getattr(part, name, None))) for name in TOKENIZER)\n", ""),),
        "tests/spending/test_bound_to_weights.py::test_data_in_a_file_beside_the_weights_is_not_saved[chat template]",
    ),
    Mutant(
        "training records are taken for public ones",
        "trainer/data_guards.py",
        (("            if found is not None and found.share > found.allowed:\n", "            if False:\n"),),
        "tests/trainer/test_attacks.py::test_training_records_are_not_taken_for_public_ones",
    ),
    Mutant(
        "the self-check leaves out an input that training batches have",
        "trainer/data_guards.py",
        (("    if further:\n", "    if False:\n"),),
        "tests/trainer/test_late_changes.py::test_an_input_that_only_training_batches_have_is_checked",
    ),
    Mutant(
        "the packing of TRL is let in",
        "trainer/refusals.py",
        (('bool(getattr(a, "packing", False))', "False"),),
        "tests/trainer/test_attacks.py::test_trl_arguments_that_join_records_are_refused[packing]",
    ),
    Mutant(
        "models that choose tokens of long rows are checked on short rows only",
        "trainer/setup.py",
        (("if meet else []\n", "if False else []\n"),),
        "tests/gradients/test_ties.py::test_attention_that_chooses_tokens_of_long_rows_only_is_refused_for_long_records",
    ),
    Mutant(
        "writing the average of the weights hides what a callback has written to them",
        "trainer/averaging.py",
        (("        self.provenance.check_update()\n", ""),),
        "tests/trainer/test_averaging.py::test_what_a_callback_writes_is_noticed",
    ),
    Mutant(
        "records that a forward pass notes in the config, or a collator in the vocabulary, are saved",
        "trainer/provenance.py",
        (("        if written:\n", "        if False:\n"),),
        "tests/spending/test_bound_to_weights.py::test_data_in_settings_or_a_vocabulary_is_not_saved",
    ),
    Mutant(
        "records that the model cannot take are charged",
        "trainer/setup.py",
        (("    run_collectively(ranks, model, try_records, trainer, model, loss)\n", ""),),
        "tests/trainer/test_attacks.py::test_records_that_the_model_cannot_take_cost_nothing",
    ),
    Mutant(
        "a rehearsal evaluates on the records that it trains on",
        "trainer/rehearsal.py",
        (("first=2**31", "first=2**40"),),
        "tests/trainer/test_attacks.py::test_a_rehearsal_runs_everything_and_charges_nothing",
    ),
    Mutant(
        "a record that stands in the training set ten times costs as much as one",
        "trainer/data_guards.py",
        (("if repeats > config.group_size and config.is_private:", "if False:"),),
        "tests/tasks/test_repeats.py::test_a_repeated_record_is_refused_or_charged",
    ),
    Mutant(
        "a subclass of a private trainer brings a loss of the whole batch, and it is ignored",
        "trainer/training_run.py",
        (("type(self).compute_loss is not self.objective_of.compute_loss", "False"),),
        "tests/trainer/test_seq2seq.py::test_a_loss_of_the_batch_is_refused",
    ),
    Mutant(
        "label smoothing is left out of the private objective",
        "trainer/training_run.py",
        (("self.per_sample_loss, self.args.label_smoothing_factor,", "self.per_sample_loss, 0.0,"),),
        "tests/trainer/test_seq2seq.py::test_the_update_is_that_of_a_for_loop",
    ),
    Mutant(
        "a parameter that is unfrozen in a run is left out, silently",
        "trainer/guards.py",
        (("    if odd:\n", "    if False:\n"),),
        "tests/trainer/test_guards.py::test_what_is_trained_stays_so_in_a_run[unfrozen]",
    ),
    Mutant(
        "ranks that hold other records of a torch dataset",
        "trainer/guards.py",
        (("hashes.pop() if len(hashes) == 1 else None", "None"),),
        "tests/trainer/test_guards.py::test_the_order_of_records_shows",
    ),
    Mutant(
        "a run that was refused for its past is let in when it is tried again",
        "trainer/provenance.py",
        (
            (
                "                yield\n        finally:\n",
                "                yield\n        finally:\n            self._changed = True\n",
            ),
        ),
        "tests/spending/test_lineage_cards.py::test_a_run_that_was_refused_is_refused_again_in_a_folder_with_a_history",
    ),
    Mutant(
        "the card of a cheap ledger is written for weights that were trained on elsewhere",
        "trainer/provenance.py",
        (("            ranks.run_on_first(self._check_cost)\n", "            pass\n"),),
        "tests/spending/test_lineage_cards.py::test_weights_that_were_trained_on_are_not_saved_with_an_old_card",
    ),
    Mutant(
        "a trainer that has not trained writes its folder's card for any weights",
        "trainer/provenance.py",
        (("looked_up = None if found or", "looked_up = None if True or"),),
        "tests/spending/test_lineage_cards.py::test_a_trainer_that_has_not_trained_saves_what_its_ledger_has",
    ),
    Mutant(
        "a folder's history is taken for that of whatever is trained there",
        "trainer/provenance.py",
        (("resumed=self._loaded)", "resumed=bool(self.trainer.spending.events))"),),
        "tests/spending/test_lineage.py::test_a_trained_adapter_must_be_named",
    ),
    Mutant(
        "keys from args.seed, which is published",
        "trainer/training_run.py",
        (
            (
                "return Keys(self.ranks.key(), self.ranks.key())",
                "key = type(self.ranks.key()).shared(lambda own: self.args.seed.to_bytes(32, 'big'))\n"
                "        return Keys(key, key)",
            ),
        ),
        "tests/trainer/test_trainer.py::test_the_seed_does_not_repeat_noise_and_draws",
    ),
    Mutant(
        "a loop that starts again in the middle repeats noise and draws",
        "trainer/training_run.py",
        (("        if self._mechanism is not None:\n            raise", "        if False:\n            raise"),),
        "tests/trainer/test_guards.py::test_a_run_that_begins_anew_within_train_would_repeat_its_noise",
    ),
    Mutant(
        "the trainer skips empty batches",
        "trainer/private_mixin.py",
        (
            (
                "        self._mechanism.step(OneByOne",
                "        if not inputs.size:\n            return torch.zeros(())\n"
                "        self._mechanism.step(OneByOne",
            ),
        ),
        "tests/trainer/test_trainer.py::test_empty_batches_are_steps",
    ),
    Mutant(
        "sample rate of the micro-batch instead of the logical batch",
        "trainer/training_run.py",
        (
            (
                "self._attach(method, train_dataloader.batch_sampler.sample_rate, steps)",
                "self._attach(method, self.args.per_device_train_batch_size / len(self.train_dataset), steps)",
            ),
        ),
        "tests/test_field_bugs.py::test_accumulation_changes_neither_steps_nor_sample_rate",
    ),
    Mutant(
        "steps divided by gradient accumulation once more",
        "trainer/training_run.py",
        (
            (
                "steps = max(max_steps - self.state.global_step, 0)\n",
                "steps = max(max_steps - self.state.global_step, 0) // (self._given_batch_size"
                " // self.args.per_device_train_batch_size)\n",
            ),
        ),
        "tests/test_field_bugs.py::test_accumulation_changes_neither_steps_nor_sample_rate",
    ),
    Mutant(
        "settings of later are not checked, and not those that are enforced",
        "trainer/training_run.py",
        (
            ("            self.hyperparameter_search()\n        self._check_settings()\n", "            pass\n"),
            ("        self.spending.set_budget(\n            config", "        str((config"),
            ("config.accountant, config.group_size\n        )", "config.accountant, config.group_size))"),
        ),
        "tests/trainer/test_guards.py::test_a_budget_that_is_raised_later_is_the_one_enforced",
    ),
    Mutant(
        "the training loss is logged without noise",
        "trainer/training_run.py",
        (
            (
                "self._keys, sample_rate, steps)\n",
                "self._keys, sample_rate, steps)\n        self._mechanism.nonprivate = {}\n",
            ),
            (
                "self.log_filter.config = self.dp_config\n",
                "self.log_filter.config = DPConfig(**{**self.dp_config.to_dict(), 'log_nonprivate': True})\n",
            ),
        ),
        "tests/trainer/test_spending.py::test_no_training_loss_is_written_unless_asked_for",
    ),
    Mutant(
        "the training set is evaluated on, and its loss logged",
        "trainer/guards.py",
        (("if dataset is not None and same:", "if False:"),),
        "tests/trainer/test_guards.py::test_the_training_set_is_not_evaluated_on",
    ),
    Mutant(
        "generator states are saved with checkpoints",
        "trainer/publishing.py",
        (("    def _save_rng_state(", "    def _unused_save_rng_state("),),
        "tests/trainer/test_spending.py::test_no_key_and_no_generator_state_is_saved",
    ),
    Mutant(
        "a collator may mix records",
        "trainer/data_guards.py",
        (("    if logical.max_rows > 1:\n", "    if False:\n"),),
        "tests/trainer/test_attacks.py::test_a_collator_that_mixes_records_is_refused_before_anything_is_charged",
    ),
    Mutant(
        "a label out of range is charged",
        "trainer/data_guards.py",
        (("    if all_records and trainer.dp_config.check_dataset:\n", "    if False:\n"),),
        "tests/trainer/test_attacks.py::test_a_mistake_in_the_data_costs_nothing",
    ),
    Mutant(
        "training records in another container are evaluated",
        "trainer/guards.py",
        (("        if found.share > found.allowed:\n", "        if False:\n"),),
        "tests/trainer/test_attacks.py::test_training_records_are_not_evaluated_in_any_container",
    ),
    Mutant(
        "metrics that a subclass adds are logged",
        "trainer/log_filter.py",
        (("(self._training and not listed)", "False"),),
        "tests/trainer/test_attacks.py::test_metrics_that_a_subclass_adds_are_not_logged",
    ),
    Mutant(
        "a callback sees log entries before the filter",
        "trainer/private_mixin.py",
        (("        self.log_filter.keep_first(self.callback_handler)\n        super().log", "        super().log"),),
        "tests/trainer/test_attacks.py::test_a_callback_that_pushes_ahead_sees_filtered_entries",
    ),
    Mutant(
        "a run goes on without the guard of its steps",
        "trainer/guards.py",
        (("        if self.released > 1:", "        if False:"),),
        "tests/trainer/test_late_changes.py::test_the_guard_must_stay_a_callback",
    ),
    Mutant(
        "what is written to the data of a gradient, after the noise, is released",
        "trainer/guards.py",
        (("any_set([*self._of_weights, *of_gradients])", "any_set(self._of_weights)"),),
        "tests/trainer/test_late_changes.py::test_gradients_are_left_as_the_mechanism_wrote_them[AddsToTheData]",
    ),
    Mutant(
        "backward hooks that come after the self-check mix records",
        "trainer/guards.py",
        ((', "_backward_pre_hooks", "_backward_hooks")', ")"),),
        "tests/trainer/test_late_changes.py::test_what_couples_records_after_the_self_check_is_refused[backward hook]",
    ),
    Mutant(
        "modules that come after the self-check mix records",
        "trainer/guards.py",
        (("for own in (module, type(module), type(module).forward):\n", "for own in ():\n"),),
        "tests/trainer/test_late_changes.py::test_what_couples_records_after_the_self_check_is_refused[module]",
    ),
    Mutant(
        "a step without the mechanism",
        "trainer/guards.py",
        (
            ("        if released != 1 and now:", "        if False:"),
            (
                '        if changed is not None:\n            raise RuntimeError(\n                f"`training_step`',
                '        if False:\n            raise RuntimeError(\n                f"`training_step`',
            ),
        ),
        "tests/trainer/test_attacks.py::test_a_step_that_leaves_the_mechanism_out_is_stopped",
    ),
    Mutant(
        "an interrupted run loses what it was charged for",
        "trainer/interruption.py",
        (("            control.should_save = not self._saved\n", ""),),
        "tests/trainer/test_interruption.py::test_a_signal_leaves_a_checkpoint_behind",
    ),
    Mutant(
        "a rehearsal in the output folder",
        "trainer/rehearsal.py",
        (('changes = {"output_dir": folder, ', 'changes = {"output_dir": args.output_dir, '),),
        "tests/trainer/test_attacks.py::test_a_rehearsal_runs_everything_and_charges_nothing",
    ),
    Mutant(
        "a rehearsal on the records",
        "trainer/rehearsal.py",
        (
            (
                "        train_dataset = MadeUpRecords(trainer.train_dataset, model)\n",
                "        train_dataset = trainer.train_dataset\n",
            ),
        ),
        "tests/trainer/test_attacks.py::test_a_rehearsal_does_not_read_content",
    ),
    Mutant(
        "a sampler of a subclass is ignored",
        "trainer/refusals.py",
        (('    if _origin(trainer, "_get_train_sampler") is not Trainer:\n', "    if False:\n"),),
        "tests/trainer/test_attacks.py::test_overrides_that_would_have_no_effect_are_refused",
    ),
    Mutant(
        "one more private step hides a change",
        "trainer/provenance.py",
        (("        changed = changed_since(self.model)\n", "        changed = None\n"),),
        "tests/spending/test_bound_to_weights.py::test_weights_that_were_trained_without_privacy_after_the_run_are_not_saved",
    ),
    Mutant(
        "unknown weights get the card of a folder",
        "trainer/provenance.py",
        (("if not has_trained and spending.events and", "if False and"),),
        "tests/spending/test_bound_to_weights.py::test_unknown_weights_do_not_get_the_card_of_a_folder",
    ),
    Mutant(
        "anything can be declared",
        "trainer/publishing.py",
        (("            validate.one_of(tuple(POST_PROCESSING), post_processing=kind)\n", "            pass\n"),),
        "tests/spending/test_bound_to_weights.py::test_declared_post_processing_passes_and_the_card_says_so[dtype-to_half]",
    ),
    Mutant(
        "a card is written for files that were saved by hand",
        "trainer/publishing.py",
        (("if weight_hashes(self.output_dir) not in ({}, saved):", "if False:"),),
        "tests/spending/test_bound_to_weights.py::test_no_card_is_written_for_files_that_were_saved_by_hand",
    ),
    Mutant(
        "the self-check does not know how far clipping scales tiny gradients up",
        "trainer/setup.py",
        (("clipping.clip_norm, clipping.gamma, clipping", "clipping.clip_norm, 0.01, clipping"),),
        "tests/trainer/test_selfcheck_settings.py::test_the_floor_follows_gamma",
    ),
    Mutant(
        "the self-check does not know which layers are clipped by themselves",
        "trainer/setup.py",
        (("clipping.gamma, clipping.group_of, longer)", 'clipping.gamma, lambda name: "", longer)'),),
        "tests/trainer/test_selfcheck_settings.py::test_the_groups_follow_clipping",
    ),
    Mutant(
        "the self-check runs on the training set",
        "trainer/data_guards.py",
        (("    if examples is trainer.train_dataset:\n", "    if False:\n"),),
        "tests/trainer/test_public_examples.py::test_the_training_set_itself_is_refused_wherever_it_is_asked_for",
    ),
    Mutant(
        "inputs that a subclass mixes are not tested",
        "trainer/data_guards.py",
        (("    if type(trainer)._prepare_inputs is Trainer._prepare_inputs:", "    if True:"),),
        "tests/trainer/test_late_changes.py::test_inputs_that_a_subclass_mixes_are_refused",
    ),
    Mutant(
        "something is added to gradients after the noise",
        "trainer/guards.py",
        (("        if changed is not None:\n", "        if False:\n"),),
        "tests/trainer/test_late_changes.py::test_gradients_are_left_as_the_mechanism_wrote_them",
    ),
    Mutant(
        "a hook that lets records meet comes after the self-check",
        "trainer/private_mixin.py",
        (("        self._forward_guard.check()\n", ""),),
        "tests/trainer/test_late_changes.py::test_a_hook_that_comes_after_the_self_check_is_refused",
    ),
    Mutant(
        "a forward method that lets records meet comes after the self-check",
        "trainer/guards.py",
        (('(*hooks, module.__dict__.get("forward"))', "hooks"),),
        "tests/trainer/test_late_changes.py::test_a_forward_method_that_comes_after_the_self_check_is_refused",
    ),
)
