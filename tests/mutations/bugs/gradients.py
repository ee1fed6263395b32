"""Bugs put into `hf_private/gradients`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "weights of a loss get gradients without noise",
        "gradients/selfcheck.py",
        (("        _check_weights_of_loss(beside)\n", ""),),
        "tests/gradients/test_selfcheck.py::test_weights_of_a_loss_are_refused",
    ),
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
        (("{key: may_remove(c) for", "{key: False for"),),
        "tests/mechanism/test_step.py::test_a_nan_record_does_not_reach_the_release[per-layer]",
    ),
    Mutant(
        "on a device, a record whose gradient is not finite is weighted with 0 instead of removed",
        "gradients/persample.py",
        (('return c.device.type != "cpu" or not c.all()', 'return c.device.type == "cpu" and not c.all()'),),
        "tests/devices/test_engine.py::test_a_step_on_a_device_is_that_of_the_cpu_to_the_last_bit",
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
                "return sq_rows.view(records, positions).sum(1).to(ds.dtype)",
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
        "losses that records share in some forward passes",
        "gradients/comparison.py",
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
        "gradients/products.py",
        (("return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x", "return x"),),
        "tests/gradients/test_persample.py::test_half_precision_is_widened_before_norms_and_sums",
    ),
    Mutant(
        "a Gram norm that may round down to nothing",
        "gradients/persample.py",
        (
            (
                "total = exact.clamp_(min=0).add_(bound.square(), alpha=ROUNDING_UNITS * limits.eps).add_(lost)",
                "total = exact.clamp_(min=0)",
            ),
        ),
        "tests/gradients/test_persample.py::test_the_gram_form_never_rounds_a_cancelling_norm_down",
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
        "batch statistics are let in (BatchNorm)",
        "gradients/layers/__init__.py",
        (("if isinstance(module, _BatchNorm) and", "if False and"),),
        "tests/gradients/test_refusals.py::test_modules_that_mix_records_are_refused_with_path_and_remedy",
    ),
    Mutant(
        "noise of standard deviation sigma, whatever the clip norm",
        "gradients/method.py",
        (("std = noise_multiplier * clip_norm if noise_multiplier else 0.0", "std = noise_multiplier"),),
        "tests/mechanism/test_step.py::test_an_empty_draw_is_paid_for_and_releases_noise_of_the_right_scale",
    ),
    Mutant(
        "an axis that the batch size divides is taken for the records",
        "gradients/layers/attribution.py",
        (
            (
                "        needed = self._needed_on_any_rank(losses.device) if sharded else self._new",
                "        needed = False",
            ),
            (
                "        found = self._find(tap, ds, queue.pop(0), rank, layout, route) if queue else None",
                "        found = 0, False",
            ),
        ),
        "tests/gradients/test_attribution.py::test_refused_by_name_at_every_size_and_exact_alone",
    ),
    Mutant(
        "all records weigh the same in the pass that tells them apart",
        "gradients/layers/attribution.py",
        (("    return values[torch.cat(rounds)[:records]].to(like)", "    return torch.ones(records).to(like)"),),
        "tests/gradients/test_attribution.py::test_refused_by_name_at_every_size_and_exact_alone[routed]",
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
        (("len(fitting) == 1 and shown > 1", "True"),),
        "tests/gradients/test_attribution.py::test_what_has_no_gradient_yet_is_measured_later",
    ),
    Mutant(
        "a layout that fits by chance is remembered",
        "gradients/layers/attribution.py",
        (("len(fitting) == 1 and shown > 1", "shown > 1"),),
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
        "one record after the other, each with the first copy",
        "gradients/layers/copies.py",
        (("one({k: c[n] for k, c in", "one({k: c[0] for k, c in"),),
        "tests/spending/test_adapters.py::test_adapters_with_functions_of_their_own_are_exact_in_batches[loha]",
    ),
    Mutant(
        "a matrix that a weight was written into keeps its values",
        "gradients/layers/copied_call.py",
        (("        target.fill_(torch.nan)\n", ""),),
        "tests/spending/test_adapters.py::test_what_reads_a_written_matrix_past_its_copies_is_seen",
    ),
    Mutant(
        "made-up records of models that read images have none",
        "tasks/synthetic.py",
        (("    if reads_images:\n        batch = with_images", "    if False:\n        batch = with_images"),),
        "tests/tasks/test_image_text.py::test_images_that_mix_are_found",
    ),
    Mutant(
        "a module that looks at the shape of its parameter gets copies",
        "gradients/layers/copies.py",
        (("        if states is not None:", "        if False:"),),
        "tests/gradients/test_attribution.py::test_a_module_that_looks_at_the_shape_of_its_parameter_is_exact",
    ),
    Mutant(
        "a batch as large as the parameter hides that a module looks at its shape",
        "gradients/layers/tap.py",
        (("remember = len(g) not in g.shape[1:]", "remember = True"),),
        "tests/gradients/test_attribution.py::test_a_module_that_looks_at_the_shape_of_its_parameter_is_exact",
    ),
    Mutant(
        "squares of factors underflow before the Gram product",
        "gradients/persample.py",
        (('if x.device.type == "cpu" and not self._is_safe(features=x.shape[2]):', "if False:"),),
        "tests/gradients/test_persample.py::test_norms_of_factors_whose_squares_are_out_of_range",
    ),
    Mutant(
        "a length that underflowed to 0 counts as safe",
        "gradients/persample.py",
        (("return least <= shortest and", "return (least <= shortest or not shortest) and"),),
        "tests/gradients/test_persample.py::test_norms_of_a_record_whose_squares_are_all_out_of_range",
    ),
    Mutant(
        "a position whose square underflows is lost from the norm",
        "gradients/persample.py",
        ((".add_(lost)", ""),),
        "tests/gradients/test_persample.py::test_a_position_that_is_tiny_beside_another_is_not_lost",
    ),
    Mutant(
        "the self-check compares norms, not gradients",
        "gradients/comparison.py",
        (
            (
                "            difference = run.distances(other, reached)",
                "            difference = (run.norms(reached) - other.norms(reached)).abs()",
            ),
        ),
        "tests/gradients/test_selfcheck_precision.py::test_a_change_of_direction_is_seen",
    ),
    Mutant(
        "one seed is tried in training mode",
        "gradients/selfcheck.py",
        (("range(GRADIENT_SEEDS, GRADIENT_SEEDS + LOSS_SEEDS)", "range(0)"),),
        "tests/gradients/test_selfcheck.py::test_models_that_couple_records_are_refused",
    ),
    Mutant(
        "the self-check runs in half precision",
        "gradients/undisturbed.py",
        (("            x.data = data.float()", "            pass"),),
        "tests/gradients/test_selfcheck_precision.py::test_models_in_which_padding_moves_gradients_are_refused_in_any_precision",
    ),
    Mutant(
        "the self-check runs under autocast",
        "gradients/undisturbed.py",
        (('            model.__dict__["forward"] = model.__dict__["_original_forward"]', "            pass"),),
        "tests/gradients/test_selfcheck_state.py::test_the_model_computes_in_float32_whatever_wraps_it",
    ),
    Mutant(
        "rounding of tiny gradients is excused, however much clipping scales it up",
        "gradients/selfcheck.py",
        (("floor = min(clip_norm / math.sqrt(len(groups)), gamma)", "floor = 1.0"),),
        "tests/gradients/test_selfcheck_precision.py::test_rounding_of_tiny_gradients_is_no_coupling",
    ),
    Mutant(
        "the floor of the self-check is a hundred times what it says",
        "gradients/comparison.py",
        (("FLOOR = 1e-6", "FLOOR = 1e-4"),),
        "tests/gradients/test_selfcheck_precision.py::test_tiny_gradients_are_compared_down_to_the_floor",
    ),
    Mutant(
        "the self-check runs on one record, seven times",
        "gradients/selfcheck.py",
        (("        _check_distinct(batch)\n", ""),),
        "tests/gradients/test_selfcheck.py::test_made_up_records_that_are_alike_are_refused",
    ),
    Mutant(
        "padding is checked for the longest record only",
        "gradients/selfcheck.py",
        (("        for n in range(size):\n", "        for n in (0,):\n"),),
        "tests/gradients/test_selfcheck_precision.py::test_padding_is_checked_for_short_records_too",
    ),
    Mutant(
        "any difference counts as rounding",
        "gradients/comparison.py",
        (("if not bool((difference <= excused).all()):", "if False:"),),
        "tests/gradients/test_selfcheck_precision.py::test_a_change_of_direction_is_seen",
    ),
    Mutant(
        "a layer that is clipped by its own norm is compared by the norm of all",
        "gradients/selfcheck.py",
        (("groups.setdefault(group_of(name), [])", 'groups.setdefault("", [])'),),
        "tests/gradients/test_selfcheck_precision.py"
        "::test_a_layer_with_a_tiny_gradient_is_compared_by_itself_if_it_is_clipped_by_itself",
    ),
    Mutant(
        "buffers stay as a failed self-check leaves them",
        "gradients/undisturbed.py",
        (("                        x.copy_(values[id(x)])", "                        pass"),),
        "tests/gradients/test_selfcheck_state.py::test_buffers_and_weights_are_restored_when_the_check_raises",
    ),
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
        "rows of one unit get the copies of parameters of another",
        "gradients/layers/tap.py",
        (("copy.repeat_interleave(rows, 0)", "copy.repeat(rows, *[1] * (copy.dim() - 1))"),),
        "tests/mechanism/test_units.py::test_norms_and_sums_of_units_are_exact",
    ),
    Mutant(
        "a product of LoRA's factors leaves out the weight that it is added to",
        "gradients/layers/low_rank.py",
        (("return y if self.base is None else x @ self.base + y", "return y"),),
        "tests/gradients/test_shared.py::test_experts_with_adapters_are_exact_without_copies_of_their_weights",
    ),
    Mutant(
        "a layer with an adapter may change its weights",
        "gradients/selfcheck.py",
        (("float(p.detach().sum(dtype=torch.float64))", "0.0"),),
        "tests/gradients/test_selfcheck_state.py::test_a_layer_with_an_adapter_may_not_change_its_weights",
    ),
    Mutant(
        "copies that meet activations of new shapes are not measured",
        "gradients/layers/copied_call.py",
        (("            self.tap.book.attribution.require()", "            pass"),),
        "tests/gradients/test_shared.py"
        "::test_one_model_is_never_wrong_at_one_size_after_others[unclear-scale, time first]",
    ),
    Mutant(
        "rows that are filled from a table are taken for records without a measurement",
        "gradients/layers/copied_call.py",
        (("            attribution.require()", "            pass"),),
        "tests/gradients/test_shared.py::test_rows_that_are_filled_from_a_table_are_exact_if_they_are_records",
    ),
    Mutant(
        "a call with copies is compared in its values, not in its gradients",
        "gradients/layers/agreement.py",
        (
            (
                "return placed if same and _same_gradients(pairs, several, single, limit) else None",
                "return placed if same else None",
            ),
        ),
        "tests/gradients/test_shared.py::test_a_batch_statistic_that_shows_in_gradients_alone_is_refused",
    ),
    Mutant(
        "a function of its own takes a value computed of parameters, and its gradient is lost",
        "gradients/layers/shared.py",
        (('        raise refusal(self.names, self.tap, "a function of its own takes it")', "        return None"),),
        "tests/gradients/test_refusals.py::test_an_uncovered_use_is_an_error_by_name_and_exact_in_a_batch_of_one[True]",
    ),
    Mutant(
        "a function of its own takes a parameter, and its gradient is lost",
        "gradients/bookkeeper.py",
        (("            for leaf in (p, self._tapped.get(id(p))):", "            for leaf in (p,):"),),
        "tests/gradients/test_refusals.py::test_an_uncovered_use_is_an_error_by_name_and_exact_in_a_batch_of_one[False]",
    ),
    Mutant(
        "rows of an expert belong to records in turn",
        "gradients/layers/routed.py",
        (
            (
                "route = Route(torch.arange(rows, device=x.device) // (rows // records), records)",
                "route = Route(torch.arange(rows, device=x.device) % records, records)",
            ),
        ),
        "tests/gradients/test_shared.py::test_experts_are_exact_whatever_kernel_is_configured[eager]",
    ),
    Mutant(
        "two uses of one expert: the last counts",
        "gradients/slices.py",
        (("parts[part] = parts[part] + value if part in parts else value", "parts[part] = value"),),
        "tests/gradients/test_shared.py::test_slices_are_the_gradients_that_they_stand_for",
    ),
    Mutant(
        "parts of a parameter that overlap count twice in the norm",
        "gradients/slices.py",
        (
            (
                "if not isinstance(other, Slices) or _overlap(self.parts, other.parts):",
                "if not isinstance(other, Slices):",
            ),
        ),
        "tests/gradients/test_shared.py::test_slices_that_overlap_add_up_before_the_norm",
    ),
    Mutant(
        "the self-check does not look at choices among equal scores",
        "gradients/selfcheck.py",
        (("if lengths <= shorter.lengths:", "if True:"),),
        "tests/gradients/test_ties.py::test_sparse_attention_whose_scores_are_often_zero_is_refused",
    ),
    Mutant(
        "both choices among equal scores are the same one",
        "gradients/ties.py",
        (('last=self.prefer == "last"', "last=False"),),
        "tests/gradients/test_ties.py::test_a_choice_among_equal_scores_is_refused",
    ),
    Mutant(
        "choices among a router's experts count as choices among tokens",
        "gradients/selfcheck.py",
        (
            ("with Choices(preferred, fixed=shorter.lengths):", "with Choices(preferred):"),
            ("if lengths <= shorter.lengths:", "if not lengths:"),
        ),
        "tests/gradients/test_ties.py::test_a_router_whose_experts_score_alike_passes",
    ),
    Mutant(
        "weighted operands are rounded to bfloat16 where their product is one of bfloat16",
        "gradients/products.py",
        (("left, right = (widen(x) for x in operands(left, right))  #", "left, right = operands(left, right)  #"),),
        "tests/gradients/test_products.py::test_the_part_of_a_record_does_not_depend_on_its_batch",
    ),
    Mutant(
        "sums in bfloat16, because the device is not tried first",
        "gradients/products.py",
        (("if agrees(way, device, axes, left, columns)]", "]"),),
        "tests/gradients/test_products.py::test_a_way_that_does_not_agree_is_not_used",
    ),
    Mutant(
        "one operand of a norm is rounded to bfloat16, that of the sum is not",
        "gradients/products.py",
        (("return left.to(HALF), right.to(HALF)\n    return", "return widen(left), widen(right)\n    return"),),
        "tests/gradients/test_products.py::test_both_operands_are_rounded_for_norms_and_for_sums",
    ),
    Mutant(
        "products in float16",
        "gradients/products.py",
        (("return HALF in dtypes and dtypes <= {HALF, torch.float32}", "return torch.float64 not in dtypes"),),
        "tests/gradients/test_products.py::test_float16_is_widened",
    ),
    Mutant(
        "products by oneDNN, although they are not those of float32",
        "gradients/onednn.py",
        ((' and bool(processor.get("avx512_f")) and _agrees()', ' and bool(processor.get("avx512_f"))'),),
        "tests/gradients/test_onednn.py::test_an_operation_that_does_not_agree_is_not_used",
    ),
    Mutant(
        "a product by oneDNN is not added to the sum of earlier records",
        "gradients/products.py",
        (("return into.add_(onednn.multiply(left, right))", "return into.copy_(onednn.multiply(left, right))"),),
        "tests/gradients/test_onednn.py::test_norms_and_sums_of_records_are_exact",
    ),
    Mutant(
        "what records share gets the gradient of all records",
        "gradients/layers/once.py",
        (
            (
                "results, grads = [y for y, _ in pairs], [g for _, g in pairs]",
                "results, grads = [y for y, _ in pairs], [g.sum(0, keepdim=True).expand_as(g) for _, g in pairs]",
            ),
        ),
        "tests/gradients/test_once.py"
        "::test_gradients_of_a_value_that_is_computed_once_are_those_of_each_record[<lambda>0]",
    ),
    Mutant(
        "rows of a shared table that the first record does not reach are left out",
        "gradients/layers/linear.py",
        (("reached = ds.flatten(0, -3).ne(0).any(-1).any(0)", "reached = ds.flatten(0, -3).ne(0).any(-1)[0]"),),
        "tests/gradients/test_once.py::test_rows_that_one_record_alone_reaches_are_not_left_out",
    ),
    Mutant(
        "two rows of one record at an expert are squared one by one instead of added up",
        "gradients/ragged.py",
        (
            (
                "            total[numbers] = value.sq_norm()",
                "            total[numbers] = (value.left.square().sum(2) * value.right.square().sum(2)).sum(1)",
            ),
        ),
        "tests/gradients/test_ragged.py::test_norms_and_sums_are_those_of_the_records[size1]",
    ),
    Mutant(
        "rows of an expert are weighted in their order, not by their record",
        "gradients/ragged.py",
        (("right, c[self.route.records], into", "right, c[self.route.records.sort().values], into"),),
        "tests/gradients/test_ragged.py::test_norms_and_sums_are_those_of_the_records[size0]",
    ),
    Mutant(
        "rows of an expert are not measured",
        "gradients/layers/attribution.py",
        (("(0, len(route.records[reached].unique()) > 1) if fits else None", "0, True"),),
        "tests/gradients/test_ragged.py::test_rows_whose_gradients_are_of_other_records_are_refused",
    ),
    Mutant(
        "a change in place does not reach the views of what records share",
        "gradients/layers/shared.py",
        (("if sum(alias() is not None for alias in self.aliases) > 1:", "if False:"),),
        "tests/gradients/test_once.py::test_a_change_in_place_that_a_view_would_not_see_is_refused",
    ),
    Mutant(
        "the bias beside a computed weight counts in the pass of weighted losses, too",
        "gradients/layers/linear.py",
        (
            (
                "        if bias_name and axis is not None:",
                "        if bias_name and (axis is not None or ctx.computed):",
            ),
            ("widen(ctx.tap.rows(ds, axis)).sum(1)", "widen(ctx.tap.rows(ds, axis or 0)).sum(1)"),
        ),
        "tests/gradients/test_once.py::test_a_computed_weight_is_exact[False]",
    ),
    Mutant(
        "a convolution's gradients are those of its first record",
        "gradients/layers/conv.py",
        (("value = Dense(torch.stack(each))", "value = Dense(torch.stack(each[:1] * len(each)))"),),
        "tests/gradients/test_once.py::test_a_convolution_with_a_computed_weight_is_exact_by_the_rule[<lambda>0]",
    ),
    Mutant(
        "a recurrent layer's gradient has the states after its steps",
        "gradients/layers/recurrent.py",
        (("states.append(torch.stack(before, 1).detach())", "states.append(torch.stack(outputs, 1).detach())"),),
        "tests/gradients/test_torch_layers.py::test_recurrent_layers_are_exact_without_copies[True-LSTM]",
    ),
)
