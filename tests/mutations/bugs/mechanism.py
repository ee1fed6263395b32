"""Bugs put into `hf_private/mechanism`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "a thread that fails leaves its piece without noise",
        "mechanism/ahead.py",
        (("else value.result()", "else value.result() if value.exception() is None else 0 * self._compute(piece)"),),
        "tests/mechanism/test_ahead.py::test_a_failing_thread_fails_the_step_and_nothing_is_released",
    ),
    Mutant(
        "the piece that was computed first, whichever is asked for",
        "mechanism/ahead.py",
        (("self._values.pop(piece, None)", "self._values.pop(next(iter(self._values), piece), None)"),),
        "tests/mechanism/test_ahead.py::test_pieces_may_be_taken_in_any_order_and_others_too",
    ),
    Mutant(
        "noise ahead that is the same in each step",
        "mechanism/noise.py",
        (('stream("noise", piece.step, piece.name)', 'stream("noise", 0, piece.name)'),),
        "tests/mechanism/test_noise.py::test_steps_names_and_keys_are_independent",
    ),
    Mutant(
        "a transform of the dataset that sees the whole draw",
        "mechanism/sampling.py",
        (("            OneByOne(dataset), batch_sampler", "            dataset, batch_sampler"),),
        "tests/mechanism/test_sampling.py::test_a_transform_of_the_dataset_never_sees_two_records",
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
        "per-layer clipping is accepted, and flat",
        "mechanism/clipping.py",
        (('if MODES[self.mode][1] == "all":', "if True:"),),
        "tests/mechanism/test_clipping.py::test_per_layer_clipping_shares_the_norm_over_all_layers_reached_or_not",
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
                "self.noise.add_(self.steps, sums, self._stds(), self._offsets())",
                "stds = {block: std if sums[block].any() else 0.0 for block, std in self._stds().items()}\n"
                "            self.noise.add_(self.steps, sums, stds, self._offsets())",
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
        "dropout masks that the seed repeats",
        "mechanism/step.py",
        (("reseed_global()  # a dropout", "pass  # a dropout"),),
        "tests/mechanism/test_step.py::test_dropout_masks_cannot_be_replayed_from_a_seed",
    ),
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
        "AUTO-V normalises gradients whose squares vanish in float32",
        "mechanism/clipping.py",
        (("return factor if self.gamma else factor.where(norm >= NEGLIGIBLE, 0)", "return factor"),),
        "tests/mechanism/test_clipping.py::test_without_gamma_automatic_clipping_is_auto_v",
    ),
    Mutant(
        "global clipping keeps the records that it must drop",
        "mechanism/clipping.py",
        (("return (norm <= lowered).to(norm.dtype)", "return torch.ones_like(norm)"),),
        "tests/mechanism/test_clipping.py::test_global_clipping_drops_large_records",
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
    Mutant(
        "the rows of a unit are added up instead of averaged",
        "mechanism/units.py",
        ((".sum(1) / self.total", ".sum(1)"),),
        "tests/mechanism/test_units.py::test_the_step_clips_each_unit_once[bert-BK-flat]",
    ),
    Mutant(
        "the mean is taken over the rows of the micro-batch instead of those of each unit",
        "mechanism/units.py",
        ((".sum(1) / self.total", ".sum(1) / num_rows"),),
        "tests/mechanism/test_units.py::test_norms_and_sums_of_units_are_exact",
    ),
    Mutant(
        "rows are clipped one by one instead of units",
        "mechanism/step.py",
        (
            ("book.rows_per_record = part.rows * rows_of_loss", "book.rows_per_record = 1"),
            (
                "losses = part.losses(self.per_sample_loss(self.model, part.batch), book.num_rows // rows_of_loss)",
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
                "records = self._chosen(drawn, counter) if self.draws_units",
                "records = self._chosen(drawn, counter)[self.rank :: self.world_size] if self.draws_units",
            ),
        ),
        "tests/mechanism/test_units.py::test_ranks_share_a_draw_and_a_unit_is_on_one_of_them[units-2]",
    ),
)
