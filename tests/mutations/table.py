"""The bugs: most were found in other libraries, the rest are easily made. A patch is (old text, new text)."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug, the file of the package it is put into, its patches, and a test of `make test` that must then fail."""

    name: str
    file: str
    patches: tuple[tuple[str, str], ...]
    test: str


MUTANTS = (
    # ---- clipping and sums
    Mutant(
        "mean instead of sum of the losses",
        "gradients/bookkeeper.py",
        (("losses.sum().backward()", "losses.mean().backward()"),),
        "tests/gradients/test_bookkeeper.py::test_full_fine_tuning_is_exact[bert]",
    ),
    Mutant(
        "clip after averaging: one factor for the whole batch",
        "gradients/method.py",
        (
            (
                "factors = clipping.factors(self.scaled_sq_norms(sq_norms(entries)), self.blocks)",
                "means = {b: s.mean().expand_as(s) for b, s in sq_norms(entries).items()}\n"
                "        factors = clipping.factors(means, self.blocks)",
            ),
        ),
        "tests/mechanism/test_step.py::test_without_noise_the_step_is_the_papers_formula[bert]",
    ),
    Mutant(
        "no clipping at all",
        "gradients/method.py",
        (("weighted_sum(entries.pop(block), scaled, ", "weighted_sum(entries.pop(block), c * 0 + 1, "),),
        "tests/mechanism/test_step.py::test_without_noise_the_step_is_the_papers_formula[t5]",
    ),
    Mutant(
        "a record whose gradient is not finite is weighted with 0 instead of removed",
        "gradients/method.py",
        (("{key: not c.all() for", "{key: False for"),),
        "tests/mechanism/test_step.py::test_a_nan_record_does_not_reach_the_release[per-layer]",
    ),
    Mutant(
        "tied weight without its cross term",
        "gradients/persample.py",
        (("exact = outer + rows + 2 * self.outer.inner(self.rows)", "exact = outer + rows"),),
        "tests/gradients/test_bookkeeper.py::test_tied_weights_need_their_cross_term",
    ),
    Mutant(
        "the last use of a weight overwrites those before (tied weights, shared layers)",
        "gradients/bookkeeper.py",
        (("self._entries[block] + part if block in self._entries else part", "part"),),
        "tests/gradients/test_bookkeeper.py::test_full_fine_tuning_is_exact[gpt2]",
    ),
    Mutant(
        "a token that occurs twice in a record is squared twice instead of added up",
        "gradients/persample.py",
        (
            (
                "return total.index_add_(0, unique // self.shape[0], rows.square().sum(1).double()).to(ds.dtype)",
                "return widen(self.ds).square().sum((1, 2))",
            ),
        ),
        "tests/gradients/test_persample.py::test_norms_and_sums_are_those_of_the_formed_gradients",
    ),
    Mutant(
        "millions of squares added one after another",
        "gradients/persample.py",
        (("whole = g.shape[1] // SUMMED * SUMMED", "whole = 0"),),
        "tests/gradients/test_persample.py::test_norms_of_many_numbers_do_not_round_down",
    ),
    Mutant(
        "Gram matrices multiplied by a product that rounds down",
        "gradients/persample.py",
        (
            (
                "(vecdot(mine.flatten(1), others.flatten(1)) for",
                "(torch.bmm(mine.flatten(1).unsqueeze(1), others.flatten(1).unsqueeze(2)).view(-1) for",
            ),
        ),
        "tests/gradients/test_persample.py::test_norms_of_tokens_that_are_all_alike_do_not_round_down",
    ),
    Mutant(
        "a layer's own forward passed over",
        "gradients/layers/__init__.py",
        ((" and self.attribute not in self.module.__dict__", ""),),
        "tests/gradients/test_bookkeeper.py::test_a_layer_with_its_own_forward_is_exact",
    ),
    Mutant(
        "half of a Gram matrix taken for the whole",
        "gradients/persample.py",
        (("mul_(math.sqrt(2))", "mul_(1)"),),
        "tests/gradients/test_persample.py::test_a_gram_matrix_computed_in_strips_equals_the_whole",
    ),
    Mutant(
        "a transform of the dataset that sees the whole draw",
        "mechanism/sampling.py",
        (("            OneByOne(dataset), batch_sampler", "            dataset, batch_sampler"),),
        "tests/mechanism/test_sampling.py::test_a_transform_of_the_dataset_never_sees_two_records",
    ),
    Mutant(
        "losses that records share in some forward passes",
        "gradients/selfcheck.py",
        (("if not difference <= SAME_LOSS * self.coarse:", "if False:"),),
        "tests/gradients/test_selfcheck.py::test_models_that_couple_records_are_refused",
    ),
    Mutant(
        "entries of one micro-batch stay in the book for the next",
        "gradients/bookkeeper.py",
        (("        self._entries = {}\n        self._batch_size = None\n        return", "        return"),),
        "tests/gradients/test_bookkeeper.py::test_one_bookkeeper_handles_batches_of_any_size",
    ),
    Mutant(
        "norms in half precision",
        "gradients/persample.py",
        (("return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x", "return x"),),
        "tests/gradients/test_persample.py::test_half_precision_is_widened_before_norms_and_sums",
    ),
    Mutant(
        "a Gram norm that may round down to nothing",
        "gradients/persample.py",
        (
            (
                "total = exact.clamp_(min=0).add_(bound, alpha=ROUNDING_UNITS * limits.eps).add_(lost)",
                "total = exact.clamp_(min=0)",
            ),
        ),
        "tests/gradients/test_persample.py::test_the_gram_form_never_rounds_a_cancelling_norm_down",
    ),
    Mutant(
        "a NaN record reaches the release",
        "mechanism/clipping.py",
        (
            (
                "factor = self._factor(total, self.clip_norm).where(finite, 0)",
                "factor = self._factor(total, self.clip_norm)",
            ),
        ),
        "tests/mechanism/test_step.py::test_a_nan_record_does_not_reach_the_release",
    ),
    Mutant(
        "per-layer clipping gives every layer the whole clip norm",
        "mechanism/clipping.py",
        (("share = self.clip_norm / math.sqrt(len(groups))", "share = self.clip_norm"),),
        "tests/mechanism/test_clipping.py::test_per_layer_clipping_shares_the_norm_over_all_layers_reached_or_not",
    ),
    Mutant(
        "only the last micro-batch counts (a zero_grad inside backward)",
        "gradients/method.py",
        (("scaled, sums.get(block), removes", "scaled, None, removes"),),
        "tests/mechanism/test_step.py::test_micro_batches_change_the_speed_only[1-flat]",
    ),
    Mutant(
        "sums that were added to in place are added a second time",
        "gradients/method.py",
        (("sums[block] = weighted_sum(", "sums[block] = sums.get(block, 0) + weighted_sum("),),
        "tests/mechanism/test_step.py::test_micro_batches_change_the_speed_only[1-flat]",
    ),
    Mutant(
        "a parameter that no rule covers is trained on autograd's gradient of all records",
        "gradients/bookkeeper.py",
        (("if reached and self.batch_size > 1:", "if False:"),),
        "tests/gradients/test_refusals.py::test_an_uncovered_use_is_an_error_by_name_and_exact_in_a_batch_of_one",
    ),
    Mutant(
        "per-layer clipping is accepted, and flat",
        "mechanism/clipping.py",
        (('if together == "all":', "if True:"),),
        "tests/mechanism/test_clipping.py::test_per_layer_clipping_shares_the_norm_over_all_layers_reached_or_not",
    ),
    Mutant(
        "a parameter that is unfrozen in a run is left out, silently",
        "trainer/guards.py",
        (("if odd := [name for", "if False and [name for"),),
        "tests/trainer/test_guards.py::test_what_is_trained_stays_so_in_a_run[unfrozen]",
    ),
    # ---- records that meet
    Mutant(
        "a collator may split a record into rows, each clipped by itself, or pack several into one",
        "tasks/micro_batches.py",
        (("if shape and shape[0] != len(records) and", "if False and"),),
        "tests/trainer/test_guards.py::test_a_row_must_be_a_record[0-splitting]",
    ),
    Mutant(
        "loss averaged over the padded length, which the longest neighbour decides",
        "tasks/losses.py",
        (("/ (labels != IGNORE_INDEX).sum(-1).clamp(min=1)", "/ labels.shape[-1]"),),
        "tests/tasks/test_losses.py::test_padding_changes_nothing[gpt2]",
    ),
    Mutant(
        "loss averaged over all tokens of the batch, as Transformers does",
        "tasks/losses.py",
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
        "norms of operands that TF32 or an autocast around train() has rounded",
        "mechanism/step.py",
        (("with full_precision(next(iter(self.parameters.values())).device):", "if True:"),),
        "tests/mechanism/test_step.py::test_coarse_products_and_autocast_around_a_step_change_nothing",
    ),
    Mutant(
        "fast noise that ends at 5.8 deviations",
        "mechanism/noise.py",
        (
            ("torch.empty(len(chunks), 2, _FAST_CHUNK", "torch.empty(len(chunks), 1, _FAST_CHUNK"),
            (".mul_(math.sqrt(0.5)).view(-1)[start", ".view(-1)[start"),
        ),
        "tests/mechanism/test_noise.py::test_fast_normals_reach_8_sigma",
    ),
    Mutant(
        "records that meet in training mode only",
        "gradients/selfcheck.py",
        (("            model.train()  # some models", "            model.eval()  # some models"),),
        "tests/gradients/test_selfcheck.py::test_models_that_couple_records_are_refused",
    ),
    Mutant(
        "a frozen weight that a forward pass changes",
        "gradients/selfcheck.py",
        (("    changed += [name for name, count in _writes", "    [name for name, count in _writes"),),
        "tests/gradients/test_selfcheck.py::test_models_that_couple_records_are_refused",
    ),
    Mutant(
        "copies of the data are pushed, if they have a name that nobody thought of",
        "publishing/release.py",
        (("if not is_published(name):", "if False:"),),
        "tests/publishing/test_release.py::test_every_file_is_decided_by_name",
    ),
    Mutant(
        "ranks that hold other records of a torch dataset",
        "trainer/guards.py",
        (("hashes.pop() if len(hashes) == 1 else None", "None"),),
        "tests/trainer/test_guards.py::test_the_order_of_records_shows",
    ),
    Mutant(
        "rotary embeddings turn with the longest record of a batch",
        "tasks/independence.py",
        (("        if length > limit:", "        if False:"),),
        "tests/tasks/test_independence.py::test_rope_that_depends_on_the_longest_record_is_refused_beyond_its_limit",
    ),
    Mutant(
        "the self-check looks at the plain sum only, in which records may be mixed up",
        "gradients/selfcheck.py",
        (("dtype=like.dtype, device=like.device) / len(like)", "dtype=like.dtype, device=like.device) * 0 + 1"),),
        "tests/gradients/test_selfcheck.py::test_the_sum_is_checked_record_by_record",
    ),
    Mutant(
        "hooks see the gradient of a record that is alone in its micro-batch",
        "gradients/bookkeeper.py",
        (("if p._backward_hooks or p._post_accumulate_grad_hooks:", "if False:"),),
        "tests/trainer/test_guards.py::test_gradient_hooks_are_refused",
    ),
    Mutant(
        "a model that was moved away from its record begins anew",
        "spending/lineage.py",
        (("if hasattr(config, MARK) and not (settled", "if False and not (settled"),),
        "tests/spending/test_lineage.py::test_a_trained_model_that_was_moved_or_saved_by_hand_is_refused",
    ),
    Mutant(
        "a trained encoder inside another model begins anew",
        "spending/lineage.py",
        (("(config is None or hasattr(own, MARK))", "config is None"),),
        "tests/spending/test_lineage.py::test_a_trained_model_that_is_a_part_of_another",
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
        "what was trained cannot be saved once the output folder is gone",
        "spending/spending.py",
        (("if path.is_file() else self._closed", "if path.is_file() else None"),),
        "tests/spending/test_lineage_cards.py::test_no_training_is_lost_because_a_folder_has_vanished",
    ),
    Mutant(
        "a folder's history is taken for that of whatever is trained there",
        "trainer/provenance.py",
        (("resumed=self._loaded)", "resumed=bool(self.trainer.spending.events))"),),
        "tests/spending/test_lineage.py::test_a_trained_adapter_must_be_named",
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
        "batch statistics are let in (BatchNorm)",
        "gradients/layers/__init__.py",
        (("if isinstance(module, _BatchNorm) and", "if False and"),),
        "tests/gradients/test_refusals.py::test_modules_that_mix_records_are_refused_with_path_and_remedy",
    ),
    # ---- noise
    Mutant(
        "noise before the sum over ranks, on every rank",
        "mechanism/step.py",
        (
            (
                "        self.ranks.all_reduce_({block: sums[block]"
                " for block in sums if block not in self.shards.rows})\n",
                "",
            ),
            (
                "        for block in sums.values():\n            block.div_(",
                "        self.ranks.all_reduce_({block: sums[block]"
                " for block in sums if block not in self.shards.rows})\n"
                "        for block in sums.values():\n            block.div_(",
            ),
        ),
        "tests/test_field_bugs.py::test_noise_comes_after_the_sum_over_ranks",
    ),
    Mutant(
        "noise scaled down by the batch size a second time",
        "mechanism/step.py",
        (
            (
                "self.method.stds(self.noise_multiplier, self.clipping.clip_norm)",
                "self.method.stds(self.noise_multiplier / self.expected_batch_size, self.clipping.clip_norm)",
            ),
        ),
        "tests/mechanism/test_step.py::test_an_empty_draw_is_paid_for_and_releases_noise_of_the_right_scale",
    ),
    Mutant(
        "noise of standard deviation sigma, whatever the clip norm",
        "gradients/method.py",
        (("std = noise_multiplier * clip_norm if noise_multiplier else 0.0", "std = noise_multiplier"),),
        "tests/mechanism/test_step.py::test_an_empty_draw_is_paid_for_and_releases_noise_of_the_right_scale",
    ),
    Mutant(
        "divided by the realised batch size, which is private",
        "mechanism/step.py",
        (
            (
                "book.backward(losses)",
                "book.backward(losses)\n                self.seen = getattr(self, 'seen', 0) + len(losses)",
            ),
            ("block.div_(self.expected_batch_size)", "block.div_(max(1, self.__dict__.get('seen', 0)))"),
        ),
        "tests/mechanism/test_step.py::test_the_sum_is_divided_by_the_expected_size_not_the_realised_one",
    ),
    Mutant(
        "no noise on parameters that no record reached",
        "mechanism/step.py",
        (
            (
                "stds = self.method.stds(self.noise_multiplier, self.clipping.clip_norm)\n",
                "stds = self.method.stds(self.noise_multiplier, self.clipping.clip_norm)\n"
                "        stds = {block: std if sums[block].any() else 0.0 for block, std in stds.items()}\n",
            ),
        ),
        "tests/mechanism/test_step.py::test_unreached_parameters_are_noised_too",
    ),
    Mutant(
        "the noise of a step is that of every other",
        "mechanism/noise.py",
        (('self._key.stream("noise", step, name)', 'self._key.stream("noise", 0, name)'),),
        "tests/mechanism/test_noise.py::test_steps_names_and_keys_are_independent",
    ),
    Mutant(
        "a step's noise may be drawn twice",
        "mechanism/noise.py",
        (("if step <= self._last_step:", "if False:"),),
        "tests/mechanism/test_noise.py::test_a_step_is_used_once_and_steps_increase",
    ),
    Mutant(
        "noise rounded to float32 before it is added",
        "mechanism/noise.py",
        (
            (
                ".view(piece.shape)\n                piece.copy_(noise.add_(piece))",
                ".view(piece.shape)\n                piece.add_(noise.to(piece.dtype))",
            ),
        ),
        "tests/mechanism/test_noise.py::test_the_float64_sum_is_rounded_once",
    ),
    Mutant(
        "keys from args.seed, which is published",
        "trainer/trainer.py",
        (
            (
                "return Keys(self.ranks.key(), self.ranks.key())",
                "return Keys(*[Key.shared(lambda own: self.args.seed.to_bytes(32, 'big')) for _ in range(2)])",
            ),
        ),
        "tests/trainer/test_trainer.py::test_the_seed_does_not_repeat_noise_and_draws",
    ),
    Mutant(
        "dropout masks that the seed repeats",
        "mechanism/step.py",
        (("reseed_global()  # a dropout", "pass  # a dropout"),),
        "tests/mechanism/test_step.py::test_dropout_masks_cannot_be_replayed_from_a_seed",
    ),
    Mutant(
        "a loop that starts again in the middle repeats noise and draws",
        "trainer/trainer.py",
        (("        if self._mechanism is not None:\n            raise", "        if False:\n            raise"),),
        "tests/trainer/test_guards.py::test_a_run_that_begins_anew_within_train_would_repeat_its_noise",
    ),
    # ---- sampling
    Mutant(
        "a shuffled loader of fixed size instead of Poisson draws",
        "mechanism/sampling.py",
        (
            (
                'stream = self._key.stream("sample", counter)',
                "size = self.expected_batch_size\n"
                "        epoch, part = divmod(counter, len(self))\n"
                "        order = np.random.default_rng(epoch).permutation(n)\n"
                "        return np.sort(order[part * size : (part + 1) * size])\n"
                '        stream = self._key.stream("sample", counter)',
            ),
        ),
        "tests/mechanism/test_sampling.py::test_draws_are_independent_coins_and_a_shuffled_loader_is_caught",
    ),
    Mutant(
        "the same draws in every epoch (no set_epoch)",
        "mechanism/sampling.py",
        (("for counter in range(epoch * len(self), (epoch + 1) * len(self)):", "for counter in range(len(self)):"),),
        "tests/mechanism/test_sampling.py::test_passes_run_on_and_set_epoch_positions_them",
    ),
    Mutant(
        "the sampler drops empty batches",
        "mechanism/sampling.py",
        (
            (
                "            yield self.share(counter)",
                "            if share := self.share(counter):\n                yield share",
            ),
        ),
        "tests/trainer/test_trainer.py::test_empty_batches_are_steps",
    ),
    Mutant(
        "the trainer skips empty batches",
        "trainer/trainer.py",
        (
            (
                "        self._mechanism.step(as_unit_batch",
                "        if not inputs.size:\n            return torch.zeros(())\n"
                "        self._mechanism.step(as_unit_batch",
            ),
        ),
        "tests/trainer/test_trainer.py::test_empty_batches_are_steps",
    ),
    Mutant(
        "a made-up record stands in for an empty batch",
        "mechanism/step.py",
        (
            (
                "        sums: dict[str, Tensor] = {}\n",
                "        sums: dict[str, Tensor] = {}\n"
                "        micro_batches = list(micro_batches) or [getattr(self, 'last', {})][: hasattr(self, 'last')]\n"
                "        self.last = micro_batches[0] if micro_batches else None\n",
            ),
        ),
        "tests/test_field_bugs.py::test_an_empty_batch_after_a_full_one_is_noise_alone",
    ),
    Mutant(
        "every rank draws for itself, so that a record may be in a batch twice",
        "mechanism/sampling.py",
        (
            (
                'stream = self._key.stream("sample", counter)',
                'stream = self._key.stream("sample", counter, str(self.rank))',
            ),
        ),
        "tests/mechanism/test_sampling.py::test_ranks_partition_the_draw",
    ),
    # ---- accounting
    Mutant(
        "charged after the release instead of before",
        "mechanism/step.py",
        (
            ("        self.ranks.run_on_all(self.charge, self.event)\n", ""),
            (
                "        self.steps += 1\n",
                "        self.steps += 1\n        self.ranks.run_on_all(self.charge, self.event)\n",
            ),
        ),
        "tests/mechanism/test_step.py::test_a_step_that_is_not_paid_for_computes_and_releases_nothing",
    ),
    Mutant(
        "charged with more noise than is added",
        "mechanism/step.py",
        (
            (
                "releases=self.method.releases(noise_multiplier))",
                "releases=self.method.releases(2 * noise_multiplier))",
            ),
        ),
        "tests/mechanism/test_step.py::test_an_empty_draw_is_paid_for_and_releases_noise_of_the_right_scale",
    ),
    Mutant(
        "sample rate of the micro-batch instead of the logical batch",
        "trainer/trainer.py",
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
        "trainer/trainer.py",
        (
            (
                "if steps := max(max_steps - self.state.global_step, 0):",
                "if steps := max(max_steps - self.state.global_step, 0) // (self._given_batch_size"
                " // self.args.per_device_train_batch_size):",
            ),
        ),
        "tests/test_field_bugs.py::test_accumulation_changes_neither_steps_nor_sample_rate",
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
        "settings of later are not checked, and not those that are enforced",
        "trainer/trainer.py",
        (
            ("            self.hyperparameter_search()\n        self._check_settings()\n", "            pass\n"),
            ("        self.spending.set_budget(config", "        str((config"),
            ("config.accountant, config.group_size)", "config.accountant, config.group_size))"),
        ),
        "tests/trainer/test_guards.py::test_a_budget_that_is_raised_later_is_the_one_enforced",
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
        "no epsilon and no noise given means no noise, silently",
        "config.py",
        (
            (
                "if self.target_epsilon is None and self.noise_multiplier is None:\n            raise ValueError(",
                "if self.target_epsilon is None and self.noise_multiplier is None:\n"
                "            self.noise_multiplier = 0.0\n            str(",
            ),
        ),
        "tests/test_config.py::test_epsilon_and_noise_exclude_each_other_and_one_is_needed",
    ),
    Mutant(
        "epsilon rounded to the nearest, not up",
        "spending/statement.py",
        (("scaleb(last), rounding=ROUND_CEILING)", "scaleb(last))"),),
        "tests/publishing/test_card.py::test_epsilon_is_rounded_up_and_not_far",
    ),
    # ---- methods
    Mutant(
        "GEP's two releases are charged as one",
        "methods/gep/method.py",
        (("return (noise_multiplier * math.sqrt(2),) * 2 if", "return (noise_multiplier * math.sqrt(2),) if"),),
        "tests/methods/gep/test_sensitivity.py::test_golden_epsilon",
    ),
    Mutant(
        "GEP's residual norm from a float32 difference, without slack",
        "methods/gep/method.py",
        (("clamp_min(0) + self.slack * sq_norm", "clamp_min(0)"),),
        "tests/methods/gep/test_sensitivity.py::test_no_gradient_releases_more_than_both_clip_norms",
    ),
    Mutant(
        "left carrier is not orthonormal",
        "methods/carriers/lowrank.py",
        (("left = orthonormal(_or_else(product, left))", "left = _or_else(product, left)"),),
        "tests/methods/carriers/test_lowrank.py::test_carriers_are_orthonormal_whatever_the_matrix",
    ),
    Mutant(
        "LSG's mask from private gradients",
        "methods/carriers/lowrank.py",
        (
            (
                "g = _columns(g, self.kept[side])",
                "g = _columns(g, g.abs().sum((0, 1)).topk(len(self.kept[side])).indices)",
            ),
        ),
        "tests/methods/carriers/test_method.py::test_norms_and_clipped_sums_equal_the_oracles",
    ),
    # ---- what is let out
    Mutant(
        "the training loss is logged without noise",
        "trainer/trainer.py",
        (
            ("log_nonprivate=config.log_nonprivate,", "log_nonprivate=True,"),
            ("LogFilter(self.dp_config)", "LogFilter(replace(self.dp_config, log_nonprivate=True))"),
            ("        self.log_filter.config = self.dp_config\n", ""),
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
        "the card shows the last run's noise, and not the weaker one before it",
        "spending/statement.py",
        (('noise = admitted(facts).get("noise", "secure")', 'noise = settings["noise"]'),),
        "tests/publishing/test_card.py::test_a_phase_does_not_hide_what_an_earlier_one_had_to_admit[run]",
    ),
    Mutant(
        "generator states are saved with checkpoints",
        "trainer/publishing.py",
        (("    def _save_rng_state(", "    def _unused_save_rng_state("),),
        "tests/trainer/test_spending.py::test_no_key_and_no_generator_state_is_saved",
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
        "the card calls a custom method BK",
        "methods/registry.py",
        (("if recorded is not None and recorded not in CONFIGURED:", "if False:"),),
        "tests/recipes/test_powersgd.py::test_the_recipe_runs_with_its_own_method_and_its_card_names_it",
    ),
    Mutant(
        "GEP forgets the sums of earlier micro-batches",
        "methods/gep/method.py",
        (("sums[block] = sums[block].add_(value) if block in sums else value", "sums[block] = value"),),
        "tests/methods/gep/test_method.py::test_micro_batches_change_nothing",
    ),
    Mutant(
        "an attacker's risk is that of the easier direction",
        "accounting/risk.py",
        (
            (
                "remove, add = accountants.pld_losses(settings, records)",
                "add, remove = accountants.pld_losses(settings, records)",
            ),
        ),
        "tests/accounting/test_risk.py::test_golden_run",
    ),
    Mutant(
        "a person's further records are left out of the risk",
        "accounting/risk.py",
        (
            (
                "remove, add = accountants.pld_losses(settings, records)",
                "remove, add = accountants.pld_losses(settings)",
            ),
        ),
        "tests/accounting/test_risk.py::test_bounds_are_tight_where_densities_can_be_integrated[three records]",
    ),
    Mutant(
        "the second opinion on the risk leaves out its certified error",
        "accounting/risk.py",
        (("remove = hockey_stick(*losses, eps - width) + error", "remove = hockey_stick(*losses, eps + width)"),),
        "tests/accounting/test_risk.py::test_prv_and_pld_agree",
    ),
    Mutant(
        "tried runs are not part of the risk",
        "accounting/risk.py",
        (("steps=int(runs) * event.steps", "steps=event.steps"),),
        "tests/accounting/test_risk.py::test_a_fixed_number_of_runs_is_composed",
    ),
    Mutant(
        "the risk of tuning is that of one run",
        "accounting/risk.py",
        (("coupled = 1 - expected_power(1 - single.advantage, runs, law)", "coupled = single.advantage"),),
        "tests/accounting/test_risk.py::test_best_of_a_random_number_of_runs",
    ),
    Mutant(
        "risks are rounded down",
        "accounting/risk.py",
        (("math.ceil(value * 10**digits)", "math.floor(value * 10**digits)"),),
        "tests/accounting/test_risk.py::test_displays_round_up",
    ),
    Mutant(
        "mu is the Gaussian that fits at epsilon 0 only",
        "accounting/tradeoff.py",
        (("inside = self.epsilons <= up_to", "inside = self.epsilons <= 0"),),
        "tests/accounting/test_risk.py::test_golden_run",
    ),
    Mutant(
        "a step without noise carries no risk",
        "accounting/risk.py",
        (("0.0 if settings is not None else 1.0", "0.0"),),
        "tests/accounting/test_risk.py::test_without_noise_everything_is_known",
    ),
    Mutant(
        "live epsilon is that of the steps before",
        "accounting/schedule.py",
        (
            (
                "index = int(np.searchsorted(self.steps, step))",
                "index = max(int(np.searchsorted(self.steps, step)) - 1, 0)",
            ),
        ),
        "tests/accounting/test_schedule.py::test_never_below_the_accountant_at_any_step",
    ),
    Mutant(
        "live epsilon forgets what was spent before",
        "accounting/schedule.py",
        (("return (*spent, Event(event.sample_rate", "return (*(), Event(event.sample_rate"),),
        "tests/accounting/test_schedule.py::test_never_below_the_accountant_at_any_step",
    ),
    # ---- forged cards, and uploads
    Mutant(
        "a card of an unknown version is believed",
        "publishing/recompute.py",
        (("if not known:", "if False:"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[version: unknown, other words-0.1.0]",
    ),
    Mutant(
        "an old card is compared with new words",
        "publishing/words.py",
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
        (("return claim.value < claimed", 'return claim.name == "epsilon" and claim.value < claimed'),),
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
        "publishing/prose.py",
        (("html.unescape(html.unescape(text))", "text"),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: numeric html entity-0.1.0]",
    ),
    Mutant(
        "a claim in LaTeX",
        "publishing/prose.py",
        (('LATEX_SYMBOLS.get(found[1], " ")', '" "'),),
        "tests/publishing/test_forged_cards.py::test_a_forged_card_is_caught[prose: latex-0.1.0]",
    ),
    Mutant(
        "a claim in look-alike letters",
        "publishing/prose.py",
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
        "1.999 runs are charged as one",
        "spending/statement.py",
        (('integer_at_least(1, **{"tuning.runs": runs})', "runs = int(runs)"),),
        "tests/publishing/test_forged_cards.py::test_only_whole_runs_are_charged[1.999]",
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
    # ---- which record a gradient belongs to, and what the self-check compares
    Mutant(
        "an axis that the batch size divides is taken for the records",
        "gradients/layers/attribution.py",
        (
            (
                "        needed = self._needed_on_any_rank(losses.device) if sharded else self._new",
                "        needed = False",
            ),
            (
                "        found = self._find(tap, ds, queue.pop(0), rank, layout) if queue else None",
                "        found = 0, False",
            ),
        ),
        "tests/gradients/test_attribution.py::test_refused_by_name_at_every_size_and_exact_alone",
    ),
    Mutant(
        "all records weigh the same in the pass that tells them apart",
        "gradients/layers/attribution.py",
        (("    return values[torch.cat(rounds)[:records]].to(like)", "    return torch.ones(records).to(like)"),),
        "tests/gradients/test_attribution.py::test_refused_by_name_at_every_size_and_exact_alone[distances (T, T)]",
    ),
    Mutant(
        "records on another axis than the first are refused or mixed up",
        "gradients/layers/tap.py",
        (("            x = x.movedim(axis, 0)", "            pass"),),
        "tests/gradients/test_attribution.py::test_exact_at_every_size_in_any_order[time first]",
    ),
    Mutant(
        "a layer without a gradient yet counts as measured",
        "gradients/layers/attribution.py",
        (("len(fitting) == 1 and reached > 1", "True"),),
        "tests/gradients/test_attribution.py::test_what_has_no_gradient_yet_is_measured_later",
    ),
    Mutant(
        "a layout that fits by chance is remembered",
        "gradients/layers/attribution.py",
        (("len(fitting) == 1 and reached > 1", "reached > 1"),),
        "tests/gradients/test_attribution.py::test_a_layout_that_is_not_the_only_one_that_fits_is_not_remembered",
    ),
    Mutant(
        "the order in a flattened axis is measured once only",
        "gradients/layers/attribution.py",
        (("            return calls & (calls - 1) != 0", "            return True"),),
        "tests/gradients/test_attribution.py::test_the_order_in_a_flattened_axis_is_measured_again",
    ),
    Mutant(
        "a layer that is called in two layouts is remembered in the last",
        "gradients/layers/attribution.py",
        (("                layout.axis = None", "                layout.axis = axis"),),
        "tests/gradients/test_attribution.py::test_a_layer_that_is_called_in_two_layouts_is_exact",
    ),
    Mutant(
        "a module that looks at the shape of its parameter gets copies",
        "gradients/layers/copies.py",
        (("        if states is not None:", "        if False:"),),
        "tests/gradients/test_attribution.py::test_a_module_that_looks_at_the_shape_of_its_parameter_is_refused",
    ),
    Mutant(
        "a batch as large as the parameter hides that a module looks at its shape",
        "gradients/layers/tap.py",
        (("remember = len(g) not in g.shape[1:]", "remember = True"),),
        "tests/gradients/test_attribution.py::test_a_module_that_looks_at_the_shape_of_its_parameter_is_refused",
    ),
    Mutant(
        "squares of factors underflow before the Gram product",
        "gradients/persample.py",
        (("wide, self.exponent = rescaled(widen(x))", "wide, self.exponent = widen(x), None"),),
        "tests/gradients/test_persample.py::test_norms_of_factors_whose_squares_are_out_of_range",
    ),
    Mutant(
        "a position whose square underflows is lost from the norm",
        "gradients/persample.py",
        ((".add_(lost)", ""),),
        "tests/gradients/test_persample.py::test_a_position_that_is_tiny_beside_another_is_not_lost",
    ),
    Mutant(
        "the self-check compares norms, not gradients",
        "gradients/selfcheck.py",
        (
            (
                "        difference = distances(one, two)",
                "        difference = (run.norms - other.norms).abs().double()",
            ),
        ),
        "tests/gradients/test_selfcheck.py::test_a_change_of_direction_is_seen",
    ),
    Mutant(
        "one seed is tried in training mode",
        "gradients/selfcheck.py",
        (
            ("range(GRADIENT_SEEDS, GRADIENT_SEEDS + LOSS_SEEDS)", "range(0)"),
            ("GRADIENT_SEEDS = 2", "GRADIENT_SEEDS = 1"),
        ),
        "tests/gradients/test_selfcheck.py::test_models_that_couple_records_are_refused",
    ),
    Mutant(
        "the self-check runs in half precision",
        "gradients/selfcheck.py",
        (("            x.data = data.float()", "            pass"),),
        "tests/gradients/test_selfcheck.py::test_models_in_which_padding_moves_gradients_are_refused_in_any_precision",
    ),
    Mutant(
        "the self-check runs under autocast",
        "gradients/selfcheck.py",
        (('            model.__dict__["forward"] = model.__dict__["_original_forward"]', "            pass"),),
        "tests/gradients/test_selfcheck.py::test_the_model_computes_in_float32_whatever_wraps_it",
    ),
    Mutant(
        "rounding of tiny gradients is excused, however much clipping scales it up",
        "gradients/selfcheck.py",
        (("floor=min(clip_norm, gamma)", "floor=1.0"),),
        "tests/gradients/test_selfcheck.py::test_rounding_of_tiny_gradients_is_no_coupling",
    ),
    Mutant(
        "buffers stay as a failed self-check leaves them",
        "gradients/selfcheck.py",
        (("                        x.copy_(values[id(x)])", "                        pass"),),
        "tests/gradients/test_selfcheck.py::test_buffers_and_weights_are_restored_when_the_check_raises",
    ),
    # ---- attacks by way of the data, and mistakes that would be charged
    Mutant(
        "a collator may mix records",
        "trainer/data_guards.py",
        (("    if logical.max_rows > 1:\n", "    if False:\n"),),
        "tests/trainer/test_attacks.py::test_a_collator_that_mixes_records_is_refused_before_anything_is_charged",
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
        (("range(SEEDS if random_fields else 2)", "range(1)"),),
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
        "a label out of range is charged",
        "trainer/data_guards.py",
        (("    if all_records and trainer.dp_config.check_dataset:\n", "    if False:\n"),),
        "tests/trainer/test_attacks.py::test_a_mistake_in_the_data_costs_nothing",
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
        "training records in another container are evaluated",
        "trainer/guards.py",
        (("        if known.share_of(dataset) > MOST_SHARED:\n", "        if False:\n"),),
        "tests/trainer/test_attacks.py::test_training_records_are_not_evaluated_in_any_container",
    ),
    Mutant(
        "padding makes a training record unknown",
        "trainer/fingerprints.py",
        (("        return row[: kept[-1] + 1] if kept.size else row[:0]\n", "        return row\n"),),
        "tests/trainer/test_attacks.py::test_training_records_are_not_evaluated_in_any_container[padded]",
    ),
    Mutant(
        "metrics that a subclass adds are logged",
        "trainer/log_filter.py",
        (("(self._training and not listed)", "False"),),
        "tests/trainer/test_attacks.py::test_metrics_that_a_subclass_adds_are_not_logged",
    ),
    Mutant(
        "a callback sees log entries before the filter",
        "trainer/trainer.py",
        (("        self.log_filter.keep_first(self.callback_handler)\n        super().log", "        super().log"),),
        "tests/trainer/test_attacks.py::test_a_callback_that_pushes_ahead_sees_filtered_entries",
    ),
    Mutant(
        "a step without the mechanism",
        "trainer/guards.py",
        (("        if released != 1 and any(", "        if False and any("),),
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
    # ---- a card is bound to its weights
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
        (
            (
                "groups.setdefault((*_name_and_commit(config), hasattr(config, MARK)), ",
                "groups.setdefault(_name_and_commit(config), ",
            ),
        ),
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
        "one more private step hides a change",
        "trainer/provenance.py",
        (("        changed = changed_since(self.model)\n", "        changed = None\n"),),
        "tests/spending/test_bound_to_weights.py::test_weights_that_were_trained_without_privacy_after_the_run_are_not_saved",
    ),
    Mutant(
        "weights may be trained between two private steps",
        "spending/fingerprints.py",
        (("        return None if same else next(", "        return None if True else next("),),
        "tests/spending/test_bound_to_weights.py::test_training_without_privacy_inside_a_callback[on_step_end]",
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
        "unknown weights get the card of a folder",
        "trainer/provenance.py",
        (("if not has_trained and spending.events and", "if False and"),),
        "tests/spending/test_bound_to_weights.py::test_unknown_weights_do_not_get_the_card_of_a_folder",
    ),
    Mutant(
        "what was declared after a run is not on the cards of descendants",
        "spending/statement.py",
        (('        declared.update(one.get("post_processing") or ())\n', ""),),
        "tests/spending/test_bound_to_weights.py::test_what_was_declared_is_on_the_cards_of_descendants",
    ),
    Mutant(
        "what was declared after a run is not on its card",
        "spending/statement.py",
        (('("anchors", "carriers", "noise", "post_processing")', '("anchors", "carriers", "noise")'),),
        "tests/spending/test_bound_to_weights.py::test_what_was_declared_is_on_the_cards_of_descendants",
    ),
    Mutant(
        "anything can be declared",
        "trainer/publishing.py",
        (("            validate.one_of(tuple(POST_PROCESSING), post_processing=kind)\n", "            pass\n"),),
        "tests/spending/test_bound_to_weights.py::test_declared_post_processing_passes_and_the_card_says_so[dtype-to_half]",
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
        "a card is written for files that were saved by hand",
        "trainer/publishing.py",
        (("if weight_hashes(self.output_dir) not in ({}, saved):", "if False:"),),
        "tests/spending/test_bound_to_weights.py::test_no_card_is_written_for_files_that_were_saved_by_hand",
    ),
    Mutant(
        "noise for an advantage forgets what was spent before",
        "accounting/risk_budget.py",
        (("plan = (*spent, Event(sample_rate, (sigma,), steps))", "plan = (Event(sample_rate, (sigma,), steps),)"),),
        "tests/accounting/test_risk_budget.py::test_what_is_spent_counts",
    ),
    Mutant(
        "noise for an advantage is rounded down",
        "accounting/risk_budget.py",
        (
            ("sigma, up = math.ceil(sigma * 1e6) / 1e6, 1e-6", "return math.floor(sigma * 1e6) / 1e6"),
            ("    while excess(sigma) > 0:\n        sigma, up = round(sigma + up, 6), 2 * up\n    return sigma\n", ""),
        ),
        "tests/accounting/test_risk_budget.py::test_one_gaussian_has_a_closed_form",
    ),
    Mutant(
        "a report gives attack rates of a run that is not private",
        "publishing/report/content.py",
        (("found = statement_risk(statement) if status == PRIVATE else None", "found = statement_risk(statement)"),),
        "tests/publishing/test_report.py::test_not_private_is_said_in_red_and_nothing_is_claimed",
    ),
    Mutant(
        "a report does not charge the runs that were tried",
        "publishing/report/content.py",
        (("return risk(events, delta, k, runs=math.ceil(runs))", "return risk(events, delta, k)"),),
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
        "publishing/report/rounding.py",
        (("math.ceil(share *", "math.floor(share *"),),
        "tests/publishing/test_report.py::test_golden_attack_rates_are_shown",
    ),
    Mutant(
        "text of a statement is markup in the report",
        "publishing/report/page.py",
        (("<td>{escape(one.text)}{blank}</td>", "<td>{one.text}{blank}</td>"),),
        "tests/publishing/test_report.py::test_text_of_a_statement_stays_text",
    ),
    # ---- carriers, scales and clipping styles
    Mutant(
        "a block's scale is not undone after the noise",
        "gradients/method.py",
        (("return sums[name] / self.scales[name] if name in self.scales else sums[name]", "return sums[name]"),),
        "tests/methods/carriers/test_sources.py::test_a_scale_is_undone_after_the_noise_and_leaves_the_noise_as_it_is",
    ),
    Mutant(
        "records are clipped by their norms before the scale, which is above 1",
        "gradients/method.py",
        (("clipping.factors(self.scaled_sq_norms(sq_norms(entries)), ", "clipping.factors(sq_norms(entries), "),),
        "tests/methods/carriers/test_sources.py::test_no_record_changes_the_release_by_more_than_the_clip_norm",
    ),
    Mutant(
        "a block's scale depends on the records: it makes their mean norm 1",
        "gradients/method.py",
        (
            (
                "        factors = clipping.factors(self.scaled_sq_norms",
                "        self.scales = {b: 1 / value.sq_norm().mean().sqrt().item() for b, value in entries.items()}\n"
                "        factors = clipping.factors(self.scaled_sq_norms",
            ),
        ),
        "tests/methods/carriers/test_method.py::test_norms_and_clipped_sums_equal_the_oracles",
    ),
    Mutant(
        "carriers from gradients before the noise",
        "methods/carriers/method.py",
        (
            (
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
                '        found = {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}\n'
                '        if self.source == "momentum":\n'
                "            parts = {block[-1]: part.dense().sum(0) for block, part in found.items()}\n"
                "            self.momentum.setdefault(name, Momentum()).add(parts)\n"
                "        return found",
            ),
            ("self.momentum.setdefault(name, Momentum()).add(parts)  # noised", "pass  # noised"),
        ),
        "tests/methods/carriers/test_sources.py::test_carriers_see_private_records_only_through_the_release",
    ),
    Mutant(
        "the history of the weights holds gradients before the noise",
        "methods/carriers/method.py",
        (
            (
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
                "        if name in self.start:\n"
                "            self.start[name] = self.start[name] - value.dense().sum(0).view_as(self.start[name])\n"
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
            ),
        ),
        "tests/methods/carriers/test_sources.py::test_carriers_see_private_records_only_through_the_release[history]",
    ),
    Mutant(
        "momentum resumes without its average, silently",
        "methods/carriers/method.py",
        (('if self.source == "momentum":\n                raise', "if False:\n                raise"),),
        "tests/methods/carriers/test_trainer.py::test_momentum_cannot_be_resumed_without_its_average",
    ),
    Mutant(
        "public carriers may share records with the training data",
        "methods/gep/public_data.py",
        (("    if training is not None:\n        check_apart", "    if training is None:\n        check_apart"),),
        "tests/methods/carriers/test_trainer.py::test_public_carriers_come_from_the_anchor_dataset",
    ),
    Mutant(
        "AUTO-V normalises gradients whose squares vanish in float32",
        "mechanism/clipping.py",
        (("return factor if self.gamma else factor.where(norm >= NEGLIGIBLE, 0)", "return factor"),),
        "tests/mechanism/test_clipping.py::test_without_gamma_automatic_clipping_is_auto_v",
    ),
    Mutant(
        "global clipping keeps the records that it must drop",
        "mechanism/clipping.py",
        (("return (norm <= lowered).to(norm.dtype)", "return torch.ones_like(norm)"),),
        "tests/mechanism/test_clipping.py::test_no_record_exceeds_the_clip_norm",
    ),
    Mutant(
        "automatic clipping per layer gives every layer the whole clip norm",
        "mechanism/clipping.py",
        (("share = self.clip_norm / math.sqrt(len(groups))", "share = self.clip_norm / math.sqrt(1)"),),
        "tests/methods/carriers/test_sources.py::test_no_record_changes_the_release_by_more_than_the_clip_norm",
    ),
    Mutant(
        "a group of layers is counted only if the batch reached it",
        "mechanism/clipping.py",
        (("for block in (blocks or sq_norms)}", "for block in sq_norms}"),),
        "tests/mechanism/test_clipping.py::test_groups_are_numbered_blocks",
    ),
    # ---- units of several records
    Mutant(
        "the rows of a unit are added up instead of averaged",
        "mechanism/units.py",
        ((".sum(1) / self.total", ".sum(1)"),),
        "tests/mechanism/test_units.py::test_the_step_clips_each_unit_once[bert-BK-flat]",
    ),
    Mutant(
        "rows are clipped one by one instead of units",
        "mechanism/step.py",
        (
            ("book.rows_per_record = part.rows", "book.rows_per_record = 1"),
            (
                "losses = part.losses(self.per_sample_loss(self.model, part.batch), book.num_rows)",
                "losses = self.per_sample_loss(self.model, part.batch)",
            ),
            ("units.join(entries, losses, part) if counts else None", "(entries, losses) if counts else None"),
        ),
        "tests/mechanism/test_units.py::test_one_unit_moves_the_sum_by_no_more_than_the_clip_norm",
    ),
    Mutant(
        "the parts of a unit that is split over micro-batches are clipped one by one",
        "mechanism/units.py",
        (
            (
                "        if part.whole:\n            assert not self._sums,",
                "        if True:\n            assert not self._sums,",
            ),
        ),
        "tests/mechanism/test_units.py::test_the_size_of_a_micro_batch_changes_nothing",
    ),
    Mutant(
        "the first part of a unit that is split is forgotten",
        "mechanism/units.py",
        (("one, self._sums.get(block), removes=False)", "one, None, removes=False)"),),
        "tests/mechanism/test_units.py::test_the_step_clips_each_unit_once[gpt2-RGP-flat]",
    ),
    Mutant(
        "a unit brings all of its records",
        "mechanism/units.py",
        (("if len(records) <= at_most:", "if True:"),),
        "tests/mechanism/test_units.py::test_each_unit_is_drawn_with_probability_q_and_at_most_k_of_its_records",
    ),
    Mutant(
        "where records are drawn, all records of a unit are eligible",
        "mechanism/units.py",
        (("for record in drawn if record in eligible]", "for record in drawn]"),),
        "tests/mechanism/test_units.py"
        "::test_where_records_are_drawn_at_most_k_of_a_unit_are_and_each_as_often_as_the_group_accountant_says",
    ),
    Mutant(
        "the same records of a unit are chosen in every step",
        "mechanism/units.py",
        (('key.stream("records", counter)', 'key.stream("records")'),),
        "tests/mechanism/test_units.py::test_the_records_of_a_unit_are_chosen_anew_and_all_of_them_alike",
    ),
    Mutant(
        "the records of a drawn unit are shared out among the ranks",
        "mechanism/units.py",
        (
            ("drawn = super().share(counter)", "drawn = self.draw(counter).tolist()"),
            (
                "lists = [self._chosen(unit, counter) for unit in drawn]",
                "lists = [self._chosen(unit, counter)[self.rank :: self.world_size] for unit in drawn]",
            ),
        ),
        "tests/mechanism/test_units.py::test_ranks_share_a_draw_and_a_unit_is_on_one_of_them[units-2]",
    ),
    Mutant(
        "drawn records are priced as if the unit were clipped as one",
        "spending/units.py",
        (('settings.get("unit_sampling") == "units"', "True"),),
        "tests/trainer/test_units.py::test_drawn_records_cost_what_a_group_costs",
    ),
    Mutant(
        "a record whose unit is not known is a unit of its own",
        "tasks/units.py",
        (("if value is None or not bool(value == value):", "if value is None:"),),
        "tests/tasks/test_units.py::test_an_id_that_is_missing_or_not_comparable_is_refused_by_row[NaN]",
    ),
    Mutant(
        "a unit may be in the training and in the evaluation data",
        "tasks/units.py",
        (("            if shared is not None:", "            if False:"),),
        "tests/trainer/test_units.py::test_a_unit_in_training_and_evaluation_is_refused",
    ),
    Mutant(
        "a model is continued with another unit",
        "spending/units.py",
        (("            if other != own:", "            if False:"),),
        "tests/trainer/test_units.py::test_a_model_is_continued_with_the_same_unit_only",
    ),
    Mutant(
        "the column of the unit reaches the collator",
        "tasks/units.py",
        (("return collator if self.name is None else _Hidden(collator, self.name)", "return collator"),),
        "tests/trainer/test_units.py::test_the_column_reaches_neither_model_nor_collator[list, all columns]",
    ),
    Mutant(
        "rows of one unit get the copies of parameters of another",
        "gradients/layers/tap.py",
        (("copy.repeat_interleave(rows, 0)", "copy.repeat(rows, *[1] * (copy.dim() - 1))"),),
        "tests/mechanism/test_units.py::test_norms_and_sums_of_units_are_exact",
    ),
    Mutant(
        "the self-check does not know how far clipping scales tiny gradients up",
        "trainer/trainer.py",
        (("meet, config.clip_norm, config.gamma)", "meet, config.clip_norm, 0.01)"),),
        "tests/trainer/test_selfcheck_settings.py::test_the_floor_follows_gamma",
    ),
)
