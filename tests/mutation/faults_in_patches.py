"""Faults of the patches and of what they save."""

from __future__ import annotations

from tests.mutation.fault import Fault

_CHAINS = ("tests/patches/test_chains.py", "-k", "stocks-plain or value_and_gradients or walk_finds or freed")
_SOFTMAX = ("tests/patches/test_softmax.py",)
_COPIES = ("tests/saved/test_padded.py", "tests/saved/test_copies.py")
_PINNED = ("tests/saved/test_pinned.py",)

PATCHES: tuple[Fault, ...] = (
    Fault(
        "weighted rows: weights of channels are taken for weights of rows",
        "(s.size(-1) == 1 and s.dim() <= y.dim())",
        "s.dim() <= y.dim()",
        ("tests/patches/test_weighted.py", "-k", "no_product"),
    ),
    # Handles, versions, pinned views and copies.
    Fault(
        "handle: a view starts at the beginning of its base",
        "value.storage_offset() + self._offset)",
        "value.storage_offset())",
        ("tests/saved/test_scope.py", "tests/saved/test_composition.py", *_COPIES),
    ),
    Fault(
        "handle: what autocast is active in backward matters",
        "with torch.no_grad(), _without_autocast(device):",
        "with torch.no_grad():",
        ("tests/saved", "tests/patches/test_composition.py"),
    ),
    Fault(
        "kept tensor: a change in place is not noticed",
        "    if tensor._version != version:\n        raise changed_in_place(",
        "    if False:\n        raise changed_in_place(",
        ("tests/saved/test_scope.py",),
    ),
    Fault(
        "witness: a changed tensor counts as unchanged",
        "return witness is not None and witness._version == 0",
        "return witness is not None",
        _COPIES,
    ),
    Fault(
        "pinned views: a storage is let go that somebody reads",
        "return storage_use_count(storage_id(storage)) <= 1 + len(aliases)",
        "return True",
        _PINNED,
    ),
    Fault(
        "pinned views: a change before the copy is lost",
        "if unchanged and nbytes <= LARGEST_PART",
        "if nbytes <= LARGEST_PART",
        _PINNED,
    ),
    Fault(
        "copies: a border is filled with nothing",
        "            whole.fill_(self.fill)\n",
        "            whole.zero_()\n",
        _COPIES,
    ),
    Fault(
        "copies: a border on the left is not skipped",
        "inside = inside.narrow(dim, max(before, 0), length)",
        "inside = inside.narrow(dim, 0, length)",
        _COPIES,
    ),
    # Attention probabilities.
    Fault(
        "softmax: what was done last to the scores is forgotten",
        "    for function, args, named in steps:\n",
        "    for function, args, named in list(steps)[:-1]:\n",
        _SOFTMAX,
    ),
    Fault(
        "softmax: functions of torch take the arguments of methods",
        "return {getattr(owner, name): getattr(owner, meant[name]) for owner, name in owners}",
        "return {getattr(owner, name): getattr(Tensor, meant[name], Tensor.reshape) for owner, name in owners}",
        _SOFTMAX,
    ),
    Fault(
        "softmax: a mask that has changed since is read",
        "unchanged = all(each.tensor._version == each.version for each in reads)",
        "unchanged = True",
        _SOFTMAX,
    ),
    Fault(
        "softmax: scores that have changed since are recomputed",
        "return known[2] if known[1] == tensor._version else None",
        "return known[2]",
        _SOFTMAX,
    ),
    # Chains of elementwise operations.
    Fault(
        "chains: a result that has changed since is recomputed",
        "known[1] == x._version and not",
        "known[1] <= x._version and not",
        _CHAINS,
    ),
    Fault(
        "chains: a source that has changed since is read",
        "if all(each.tensor._version == each.version for each in made.call.sources):",
        "if made.call.sources:",
        _CHAINS,
    ),
    Fault(
        "chains: a hook on a tensor inside gets no gradient", "(tensor_hooks(x) or x.retains_grad)", "False", _CHAINS
    ),
    Fault(
        "chains: what is computed without gradients gets one",
        "is_recorded = torch.is_grad_enabled() and any",
        "is_recorded = any",
        _CHAINS,
    ),
    Fault(
        "chains: one part of several stands for all",
        "values[each.number][each.part]",
        "values[each.number][0]",
        _CHAINS,
    ),
    Fault(
        "chains: a parameter is read in backward, when it may be freed",
        "*(parameter.detach().clone() for parameter in tensors[count:])",
        "*(parameter.detach() for parameter in tensors[count:])",
        _CHAINS,
    ),
    Fault(
        "chains: a module that returns their inside has them",
        "                self._unfit.add(call.name)\n",
        "                pass\n",
        _CHAINS,
    ),
    Fault(
        "chains: the last operation is forgotten",
        "for function, args, kwargs in calls:",
        "for function, args, kwargs in calls[:-1] or calls:",
        _CHAINS,
    ),
    Fault(
        "a scope of fewer families is closed inside of another one",
        "self._replaces = self.compressor is not None or inside is not None  #",
        "self._replaces = self.compressor is not None  #",
        ("tests/patches/test_experts.py", "-k", "gated_mlps_that"),
    ),
    Fault(
        "sampling: unlike rows keep the weights of others",
        "gradient = sampled_weight_gradient(dy, x, sample.rows.unpack(), sample.weights.unpack())",
        "gradient = sampled_weight_gradient(dy, x, sample.rows.unpack(), 0 * sample.weights.unpack() + 1)",
        ("tests/patches/test_sampled_linear.py", "tests/saved/test_sampled.py"),
    ),
    Fault(
        "sampling: the bias of a sampled linear has one row's gradient",
        "dbias = rows.sum(0).to(ctx.bias_dtype)",
        "dbias = rows[0].to(ctx.bias_dtype)",
        ("tests/patches/test_sampled_linear.py", "tests/saved/test_sampled.py"),
    ),
    # Patching a module and taking it back.
    Fault(
        "unpatch: the state stays behind",
        "        module.__class__ = original_class(module)\n    del module.__dict__[_STATE]",
        "        module.__class__ = original_class(module)",
        ("tests/patches/test_exactness.py", "tests/patches/test_composition.py"),
    ),
    Fault(
        "patch: a module whose forward was replaced is swapped all the same",
        'if "forward" in vars(module):\n        by = ',
        "if False:\n        by = ",
        ("tests/patches", "-k", "not sixty and not compile"),
    ),
    Fault(
        "no observer sees the copies that a recomputed batch norm keeps",
        'seen = getattr(held(node, "result1"), "beside", torch.Tensor.detach)',
        "seen = torch.Tensor.detach",
        ("tests/patches/test_batch_normalization.py", "-k", "account_sees"),
    ),
    Fault(
        "a batch norm in eval mode is not recomputed where tensors are quantised",
        'packed.tensor if hasattr(packed, "instead") else packed',
        "packed",
        ("tests/patches/test_batch_normalization.py", "-k", "account_sees"),
    ),
    Fault(
        "a ReLU behind a batch norm is saved in place of a mask of it",
        "if rewrite.code is not None and z.requires_grad and not is_recomputed:",
        "if rewrite.code is not None and z.requires_grad:",
        ("tests/patches/test_batch_normalization.py", "-k", "account_sees"),
    ),
    Fault(
        "a linear's output is planned as recomputed that a module without a scope saves",
        """where no scope exchanges what is saved\"""",
        """where no scope exchanges what is saved\" if not unseen else None""",
        ("tests/patches/test_output_recompute.py", "-k", "outside_of_every"),
    ),
    Fault(
        "under autocast a norm returns autocast's dtype, whoever reads it",
        "dtype = _dtype_under_autocast(rewrite, module, x, weight, bias, autocast)",
        "dtype = autocast",
        ("tests/patches/test_autocast.py", "-m", "not slow"),
    ),
    Fault(
        "linears read a cast of a norm's output that was made before it changed",
        "spec.narrow is None or x._version or",
        "spec.narrow is None or",
        ("tests/patches/test_autocast.py", "-k", "in_place"),
    ),
    Fault(
        "linears read a cast of a norm's output that was made without gradients",
        "x._version or not torch.is_grad_enabled():",
        "x._version:",
        ("tests/patches/test_autocast.py", "-k", "without_gradients"),
    ),
    Fault(
        "an attribute that changed after the patch does not count",
        "elif now is not value and not _is_same(now, value):\n                return False",
        "elif now is Missing:\n                return False",
        ("tests/patches/test_changed_later.py",),
    ),
    Fault(
        "checkpointed block: a condition that the model's code changes is forgotten",
        "        self._state.changes(lent)\n",
        "",
        ("tests/patches/test_conditions.py",),
    ),
    Fault(
        "checkpointed block: results on its attributes are no state",
        "return not (value.requires_grad and name in WEIGHTS)",
        "return not value.requires_grad",
        ("tests/patches/test_conditions.py",),
    ),
    Fault(
        "checkpointed block: its first run gets leaves",
        "apart((*args, *named.values()), leaves=True)",
        "[*args, *named.values()]",
        ("tests/patches/test_arguments_again.py", "-k", "get_a_leaf"),
    ),
    Fault(
        "checkpointed block: lent weights are not put back for its second run",
        "            elif now[i] is not value and (isinstance(value, CONTAINERS) or not is_same(now[i], value)):",
        "            elif isinstance(value, CONTAINERS) or not (isinstance(value, Tensor) or is_same(now[i], value)):",
        ("tests/patches/test_runs_twice.py",),
    ),
    Fault(
        "checkpointed block: the second run draws other numbers of Python and NumPy",
        "            in_states(self._generators, self._random),",
        "            nullcontext(),",
        ("tests/patches/test_runs_twice.py",),
    ),
    Fault(
        "checkpointed block: a cache given by position is kept",
        "    return function, tuple(values[len(keywords) :])",
        "    return function, args",
        ("tests/patches/test_arguments_again.py",),
    ),
    Fault(
        "logits that become true leave other logits of the same call as they are",
        "for each in (*self.family, self):",
        "for each in (self,):",
        ("tests/patches/test_loss_matrix.py", "-m", "not slow"),
    ),
    Fault(
        "whole logits do not equal the numbers that were read by chunks",
        "if self.read and ",
        "if not self.read and ",
        ("tests/patches/test_loss_matrix.py", "-m", "not slow"),
    ),
    Fault(
        "a copy of logits is the same memory",
        '(Tensor.to, (VALUE, dtype), (("copy", True),))',
        "(Tensor.to, (VALUE, dtype), ())",
        ("tests/patches/test_loss_matrix.py", "-m", "not slow"),
    ),
    Fault(
        "a user's function that changes logits in place loses its backward",
        "if own != self.own:",
        "if not own:",
        ("tests/patches/test_loss_matrix.py", "-m", "not slow"),
    ),
    # What a block's second run finds, and logits that are read late.
    Fault(
        "the second run finds the state that the first created",
        "standing([*lent, *self._created]),",
        "standing(lent),",
        ("tests/patches/test_created_state.py",),
    ),
    Fault(
        "the second run has other hooks than the first",
        "            hooks_as_before(self._hooked),\n",
        "",
        ("tests/patches/test_hooks_of_one_run.py", "-k", "full"),
    ),
    Fault(
        "a forward that changes its own weights counts as one that changes none",
        "for index in before.changed():",
        "for index in ():",
        ("tests/patches/test_experts_again.py", "-k", "error_in_every_step"),
    ),
    Fault(
        "only parameters whose versions change are compared in a second run",
        "known = own if self._is_compared else list(dict.fromkeys((*block.parameters(), *own)))",
        "known = own",
        ("tests/patches/test_unseen.py", "-k", "not_copied and parameter"),
    ),
    Fault(
        "a large buffer that a forward changes through .data goes unnoticed",
        "for tensor in self._lost:",
        "for tensor in ():",
        ("tests/patches/test_unseen.py", "-k", "not_copied and buffer"),
    ),
    Fault(
        "a linear that counts its calls runs again",
        "if notes.changes_state or around.held.has_moved:",
        "if around.held.has_moved:",
        ("tests/patches/test_unseen.py", "-k", "counts_its_calls"),
    ),
    Fault(
        "products are followed into checkpointed regions",
        "return None if held is None or checkpointing_hook() is not held[1] else held[0]",
        "return None if held is None else held[0]",
        ("tests/patches/test_weighted.py", "-k", "may_be_checkpointed"),
    ),
    Fault(
        "parameters that no tile reaches get a gradient",
        "reached = [each for each in parameters if id(each) in joined.reached]",
        "reached = parameters",
        ("tests/patches/test_tile_graphs.py",),
    ),
    Fault(
        "logits that are read late compare versions alone",
        "compares = values and (snapshot.is_late or all(tensor.is_cpu for tensor in snapshot.tensors))",
        "compares = values and not self.head.records",
        ("tests/patches/test_loss_kept.py",),
    ),
    Fault(
        "logits kept from inside a closure wait for the next step",
        "    if _is_inside_a_step():\n",
        "    if False:\n",
        ("tests/patches/test_loss_kept.py",),
    ),
    # Norms by pieces, linears that leave autocast, and what the report asks.
    Fault(
        "a piece of a norm's backward replaces the sum of those before",
        "sums[place] = added(sums[place], piece)",
        "sums[place] = added(None, piece)",
        ("tests/patches/test_replay.py", "-k", "pieces"),
    ),
    Fault(
        "a linear that leaves autocast counts as a linear",
        "rtol=1e-12, atol=1e-12) and _casts_as_linear(module, stand_ins)",
        "rtol=1e-12, atol=1e-12)",
        ("tests/patches/test_autocast.py", "-k", "leave"),
    ),
    Fault(
        "chains are followed into what the module's code checkpoints",
        "follows = func in FOLLOWED and self.follows()",
        "follows = func in FOLLOWED",
        ("tests/patches/test_chains.py", "-k", "child_that"),
    ),
    Fault(
        "a divergence by chunks is divided by the number of elements",
        '"batchmean": logits.shape[0]}[reduction]',
        '"batchmean": target.numel()}[reduction]',
        ("tests/patches/test_loss.py", "-k", "distillation"),
    ),
    Fault(
        "an instruction that loads two variables counts as one of its own",
        'elif "LOAD_FAST" in each.opname or each.opname.startswith("LOAD_DEREF"):',
        'elif each.opname == "LOAD_DEREF":',
        ("tests/saved/test_applied.py",),
    ),
    # Models that change after the patch, computed weights, FSDP1, and steps with images.
    Fault(
        "a replaced head stays stock",
        'if type(head) is nn.Linear and "forward" not in vars(head)',
        'if type(head) is nn.Bilinear and "forward" not in vars(head)',
        ("tests/patches/test_replaced_head.py",),
    ),
    Fault(
        "a parametrised down projection is read for its dtype",
        'len(given) == 1 and "parametrizations" not in down._modules',
        "len(given) == 1 and getattr(down, 'weight') is not None",
        ("tests/patches/test_computed_weights.py",),
    ),
    Fault(
        "the dtype of a loss is that of class targets",
        "dtype=target, device=device)\n        weights",
        "dtype=target, device=device)[:, 0].long()\n        weights",
        ("tests/patches/test_loss_dtypes.py",),
    ),
    Fault(
        "a weight that FSDP1 put aside counts as computed",
        "for name, each in aside.items() if type(each) is Tensor}}",
        "for name, each in aside.items() if each is aside}}",
        ("tests/patches/test_two_ranks.py", "-k", "flat_parameters"),
    ),
    Fault(
        "a plain tensor of a function's output has no graph",
        "        for each in self.family:\n            each.follow()\n        return value.as_subclass(cls)",
        "        return value.as_subclass(cls)",
        ("tests/patches/test_loss_outputs.py", "-k", "plain_tensor"),
    ),
    Fault(
        "a proof saves tensors in a checkpointed block",
        "with torch.enable_grad(), without_foreign_hooks():  # a proof",
        "with torch.enable_grad():  # a proof",
        ("tests/patches/test_output_recompute.py", "-k", "proofs"),
    ),
    Fault(
        "tiles are probed with random tokens alone",
        "for tokens in (x, x[:1, :1] + _NEAR * x):",
        "for tokens in (x,):",
        ("tests/patches/test_tile.py", "-k", "mixes_tokens"),
    ),
    Fault(
        "kept attention does not see operators that write into it",
        "self._keep_only(lambda output: output.storages.isdisjoint(written))",
        "self._keep_only(lambda output: True)",
        ("tests/patches/test_kept_in_place.py",),
    ),
    Fault(
        "kept attention may leave its block",
        "            self._keep_only(_Output.is_alone)\n",
        "            pass\n",
        ("tests/patches/test_kept_in_place.py",),
    ),
    Fault(
        "weights that are plain attributes are read anew in a second run",
        "for name in WEIGHTS if name in own or each._parameters.get(name) is not None]",
        "for name in WEIGHTS if name in MODES]",
        ("tests/patches/test_exchanged.py",),
    ),
    Fault(
        "hooks that were removed do not run again",
        "for table, had in hooked if had != table]",
        "for table, had in hooked if had != table and table]",
        ("tests/patches/test_hooks_of_one_run.py", "-k", "change_outputs"),
    ),
    Fault(
        "divisors are kept in 8 bits",
        "    return name in _ROUGH\n",
        "    return name in _ROUGH - {'div', 'truediv', 'divide'}\n",
        ("tests/saved/test_whole.py",),
    ),
    Fault(
        "a second run of a checkpointed loss reads logits that became whole",
        "        if not is_second or logits.value is None or call not in self._sources:",
        "        if logits is not None or call not in self._sources:",
        ("tests/patches/test_loss_checkpointed.py",),
    ),
    Fault(
        "a replica that has other tensors runs its stock forward",
        "    if own.get(_READS) is not None and own[_READS].hold(module):\n",
        "    if False:\n",
        ("tests/patches/test_data_parallel.py", "-k", "has_the_graph and llama"),
    ),
    Fault(
        "a parameter that two modules share is frozen and thawed at once",
        "                each.requires_grad_(was)\n",
        "                each.requires_grad_(not each.requires_grad)\n",
        ("tests/patches/test_frozen_before_backward.py", "-k", "share"),
    ),
    Fault(
        "a model in which convolutions alone are exchanged counts as unchanged",
        '    if not is_patched(model):\n        raise NegativeVerdict(\n            "Nothing in this',
        '    if not any(applied.done.values()):\n        raise NegativeVerdict(\n            "Nothing in this',
        ("tests/patches/test_convolution.py", "-k", "alone_are_exchanged"),
    ),
)
