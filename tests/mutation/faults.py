"""The faults that `tests.mutations` plants: each is one plausible mistake, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of the sources that makes them wrong."""

    name: str
    old: str
    """Text that stands once in src."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: what has to fail."""


_NORMS = ("tests/kernels/norm/test_norm.py", "tests/kernels/norm/test_norm_ops.py")
_ACTIVATION = ("tests/kernels/activation/test_activation.py",)
_GATED = ("tests/kernels/gated_mlp/test_gated.py",)
_CODES = ("tests/kernels/derivative_codes/test_codes.py",)
_INT8 = ("tests/kernels/quantize/test_quantize.py",)
_SAMPLING = ("tests/kernels/sampled_linear/test_sampling.py", "-k", "not compiles")
_CHAINS = ("tests/patches/test_chains.py", "-k", "stocks-plain or value_and_gradients or walk_finds or freed")
_SOFTMAX = ("tests/patches/test_softmax.py",)
_DROPOUT = ("tests/kernels/dropout/test_dropout.py",)
_COPIES = ("tests/saved/test_padded.py", "tests/saved/test_copies.py")
_PINNED = ("tests/saved/test_pinned.py",)
_FOLDS = ("tests/checkpoint",)
_ATOMIC = ("tests/checkpoint/test_atomic.py",)
_LEVELS = ("tests/verification/test_levels.py",)
_REPORT = ("tests/trace/test_account.py",)
_FAMILIES = ("tests/walk/test_families.py", "tests/walk/test_toys.py")
_SCENARIOS = "tests/device/numeric/test_scenarios.py"
_SHRINK = ("tests/walk/models/test_shrink.py", "tests/walk/models/test_shrink_rest.py")

FAULTS: tuple[Fault, ...] = (
    # Norms.
    Fault(
        "norm forward: eps is left out",
        ".mean(-1, keepdim=True) + spec.eps_in(x.dtype))",
        ".mean(-1, keepdim=True))",
        _NORMS,
    ),
    Fault(
        "norm forward: a layer norm is not centred",
        "mean = wide.mean(-1, keepdim=True)",
        "mean = 0 * wide.mean(-1, keepdim=True)",
        _NORMS,
    ),
    Fault(
        "norm forward: the bias is lost",
        "y = y.add_(bias.to(y.dtype)) if is_own else y + bias.to(y.dtype)",
        "y = y + 0 * bias.to(y.dtype)",
        _NORMS,
    ),
    Fault(
        "norm backward: the projection has the wrong sign",
        "(g * x_hat).mean(-1, keepdim=True), value=-1)",
        "(g * x_hat).mean(-1, keepdim=True), value=1)",
        _NORMS,
    ),
    Fault(
        "norm backward: the mean of a layer norm's gradient stays",
        "dx.sub_(g.mean(-1, keepdim=True))",
        "dx.sub_(0 * g.mean(-1, keepdim=True))",
        _NORMS,
    ),
    Fault("norm backward: dweight lacks x_hat", "(dy * x_hat).sum(rows) if rows", "dy.sum(rows) if rows", _NORMS),
    Fault(
        "norm backward: the offset of the weight is forgotten",
        "g = dy * (scale + 1 if spec.offset else scale)",
        "g = dy * scale",
        _NORMS,
    ),
    # Activations and products.
    Fault(
        "gelu: the gradient of the other approximation",
        "lambda dh, z: _aten.gelu_backward(dh, z), (0, 1)",
        'lambda dh, z: _aten.gelu_backward(dh, z, approximate="tanh"), (0, 1)',
        _ACTIVATION,
    ),
    Fault(
        "silu: the gradient of the sigmoid",
        "lambda dh, z: _aten.silu_backward(dh, z)",
        "lambda dh, z: _aten.sigmoid_backward(dh, torch.sigmoid(z))",
        _ACTIVATION,
    ),
    Fault(
        "quick_gelu: the gradient without its slope",
        "return dh * sigmoid + through_sigmoid * 1.702",
        "return dh * sigmoid + through_sigmoid",
        _ACTIVATION,
    ),
    Fault(
        "weighted rows: the bias is left out of the gradient of the weights",
        "ds += _dot(dz, (bias",
        "ds += 0 * _dot(dz, (bias",
        ("tests/kernels/linear/test_weighted.py", "-k", "pytorchs"),
    ),
    Fault(
        "weighted rows: weights of channels are taken for weights of rows",
        "(s.size(-1) == 1 and s.dim() <= y.dim())",
        "s.dim() <= y.dim()",
        ("tests/patches/test_weighted.py", "-k", "no_product"),
    ),
    Fault(
        "gated product: the gradient of up is not activated",
        "(dh * activated).to(factor.dtype)",
        "(dh * z).to(factor.dtype)",
        _GATED,
    ),
    Fault(
        "gated product: gradients of the halves are exchanged",
        "halves = _halves(both, None, gate_first)",
        "halves = _halves(both, None, not gate_first)",
        _GATED,
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
        "            whole.copy_(self.fill)\n",
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
    Fault(
        "softmax: the gradient of the cast to fp32 is lost",
        "    return dx.to(node.dtypes[0])\n",
        "    return dx.to(torch.bfloat16).to(node.dtypes[0])\n",
        ("tests/kernels/softmax",),
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
    # Codes and quantised tensors.
    Fault(
        "codes: the highest level is never chosen",
        "floor().clamp(0, len(code.levels) - 1)",
        "floor().clamp(0, len(code.levels) - 2)",
        _CODES,
    ),
    Fault("codes: rounding is always down", "codes = (place + 0.5).floor()", "codes = place.floor()", _CODES),
    Fault(
        "codes: NaN is not flagged", "flagged = z.isnan()", "flagged = torch.zeros_like(z, dtype=torch.bool)", _CODES
    ),
    Fault(
        "int8: the last level is not used",
        "step = (high - low) / torch.full_like(low, LEVELS)",
        "step = (high - low) / torch.full_like(low, LEVELS + 1)",
        _INT8,
    ),
    Fault(
        "int8: rounding up to the padding of the last group",
        "counted = inside & finite",
        "counted = finite",
        _INT8,
    ),
    # Sampling and dropout.
    Fault(
        "sampling: no row is certain",
        "certain = (tail / left).argmin()",
        "certain = (tail / left).argmin() * 0",
        _SAMPLING,
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
    Fault(
        "dropout: backward draws another mask",
        "return SeededDropoutFunction.apply(dy, ctx.mask), None",
        "return SeededDropoutFunction.apply(dy, Mask(ctx.mask.seed + 1, ctx.mask.p, ctx.mask.scale)), None",
        _DROPOUT,
    ),
    Fault(
        "dropout: what is kept is not scaled",
        "uniform(index, mask.seed) >= mask.threshold, mask.scale)",
        "uniform(index, mask.seed) >= mask.threshold, 1.0)",
        _DROPOUT,
    ),
    Fault(
        "counter: the high word of an index does not count",
        "_mix(low ^ first) + high * _GOLDEN + second",
        "_mix(low ^ first) + second",
        ("tests/kernels/base/test_counter.py", *_DROPOUT),
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
    # Folds and checkpoints.
    Fault(
        "fold: the offset of the norm is forgotten",
        "gamma.reshape(-1) + offset",
        "gamma.reshape(-1)",
        _FOLDS,
    ),
    Fault("fold: a 16-bit weight is rounded twice", "bits |= back != values", "pass", _FOLDS),
    Fault(
        "fold: a scale of many bits is multiplied in fp32",
        "exact = bool((self._single == scale).all()) and not",
        "exact = bool((self._single == scale).all()) or not",
        _FOLDS,
    ),
    Fault(
        "fold: the sum of the bias loses its low part",
        "return total, low - (total - high)",
        "return total, 0 * low",
        _FOLDS,
    ),
    Fault(
        "fold: a folded norm keeps its weight",
        "operations[fold.weight] = Fill(1.0 - fold.offset)",
        "pass",
        _FOLDS,
    ),
    Fault(
        "writer: a fold that overflows is written",
        "overflowing = {name for name, change in _changes(written).items() if change.infinities}",
        "overflowing: set[str] = set()",
        _FOLDS,
    ),
    Fault(
        "writer: --force replaces a folder that holds other files",
        "foreign = sorted({_top(name) for name in found if name not in records and name != MANIFEST})",
        "foreign: list[str] = []",
        _ATOMIC,
    ),
    Fault(
        "writer: what appears in the target meanwhile is replaced",
        "if present != (files or {}):",
        "if False:",
        _ATOMIC,
    ),
    Fault("writer: any folder of that name is a leftover", "if not _is_stage(root):", "if False:", _ATOMIC),
    Fault(
        "writer: a private source becomes a readable copy",
        "& ~(0o077 & ~origin.stat().st_mode)",
        "",
        ("tests/checkpoint/test_writer.py",),
    ),
    Fault(
        "manifest: runs of channels are joined across gaps",
        "if runs and channel == (-1 if runs[-1][0] < 0 else sum(runs[-1])):",
        "if runs:",
        _FOLDS,
    ),
    # Verification.
    Fault(
        "verify: a bf16 product may be a neighbour of the nearest",
        "if not np.array_equal(product.view(torch.int16).numpy(), after):",
        "if np.abs(product.view(torch.int16).numpy() - after).max() > 1:",
        ("tests/verification/test_recompute.py",),
    ),
    Fault(
        "verify: a file of the same size counts as the same",
        "same = path.stat().st_size == record.size and (known.get(path) or sha256(path)) == record.sha256",
        "same = path.stat().st_size == record.size",
        ("tests/verification/test_weights.py",),
    ),
    Fault(
        "verify: a large error only warns",
        '"warn" if warns is not None and value <= warns else "fail"',
        '"fail" if warns is None else "warn"',
        _LEVELS,
    ),
    Fault(
        "verify: the forward's limit is a hundred times what it was", "WARN_RATIO = 2.0", "WARN_RATIO = 200.0", _LEVELS
    ),
    Fault("verify: hidden bytes pass", '"pass" if hidden == 0 else "fail"', '"pass"', _LEVELS),
    # Reports.
    Fault(
        "report: what a block keeps is counted for every block",
        'if each.part == "block" and each.block == block)',
        'if each.part == "block")',
        _REPORT,
    ),
    Fault(
        "report: a view counts as memory of its own",
        "if address in aliases:",
        "if not aliases:",
        ("tests/trace",),
    ),
    # The walk.
    Fault(
        "walk: two norms share the ids of their channels",
        "self._next_id += width",
        "self._next_id += 0",
        _FAMILIES,
    ),
    Fault(
        "walk: a norm with obstacles is folded",
        "fold_obstacles=tuple(dict.fromkeys(_obstacles(mode, record, readers))),",
        "",
        _FAMILIES,
    ),
    Fault(
        "walk: cautions are forgotten",
        "cautions=tuple(_cautions(record, readers, loss_head)),",
        "",
        _FAMILIES,
    ),
    Fault(
        "walk: what inner models return is free to change",
        'if name != self._call.part and isinstance(output, Mapping) and "last_hidden_state" in output:',
        "if False:",
        ("tests/walk/test_families.py", "tests/walk/calls/test_parts.py", "tests/walk/test_named_families.py"),
    ),
    Fault(
        "linear inputs: a linear counts as another operation that saves its input",
        "if not save.function or (save.functions_called, key) not in linears:",
        "if key is not None:",
        ("tests/walk/flow/test_linear_inputs.py",),
    ),
    Fault(
        "linear inputs: one call that saves is enough",
        "return tuple(dict.fromkeys((*before, *now))) if before and now else ()",
        "return tuple(dict.fromkeys((*before, *now)))",
        ("tests/walk/flow/test_linear_inputs.py",),
    ),
    Fault("shrink: a model of one kind of layer loses all but one", "MIN_DEPTH = 2", "MIN_DEPTH = 1", _SHRINK),
    Fault(
        "inputs: ids beyond the small vocabulary are left",
        "taken = (ids >= limit) | torch.isin(ids, special)",
        "taken = torch.isin(ids, special)",
        ("tests/walk/calls/test_fit.py",),
    ),
    Fault(
        "inputs: a placeholder of the batch loses its meaning",
        "fitting = torch.where(ids == old, new, fitting)",
        "pass",
        ("tests/walk/calls/test_fit.py",),
    ),
    # Kernels, in the interpreter.
    Fault(
        "Triton counter: the seed's high word does not count",
        "first = _mix(_sum(_mix(_sum(low, _GOLDEN)), high))",
        "first = _mix(_sum(_mix(_sum(low, _GOLDEN)), low))",
        ("tests/triton/test_dropout.py",),
    ),
    # What a GPU changes beside speed.
    Fault(
        "a block that runs again in the thread of a device takes its nodes for those of the first run",
        "return bool(hooks) and all(hook in self._made_inside for hook in hooks)",
        "return bool(hooks) and current_graph_task_id() == -1",
        (_SCENARIOS, "-k", "bert and levels and bf16"),
    ),
    Fault(
        "the loss waits for the labels on a GPU",
        "kept = None if is_on_gpu(source.x) else _counted(",
        "kept = _counted(",
        (_SCENARIOS, "-k", "llama and full and none and fp32"),
    ),
    Fault(
        "the gradient of a chunk of logits lives while the next is computed",
        "        del dy  # before the next chunk's is computed",
        "        pass",
        ("tests/benchmarks/test_loss.py",),
    ),
    Fault(
        "a head on another device computes its logits whole",
        'return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and _hooks_its_class(module)',
        "return hook is NotImplemented",
        ("tests/device/numeric/test_training_loop.py", "-k", "two_devices"),
    ),
    Fault(
        "a result that was copied into another layout counts as changed in place",
        "else target.copy_(result).data",
        "else target.copy_(result)",
        ("tests/kernels/norm/test_norm_layouts.py", "tests/triton/test_norm_layouts.py"),
    ),
    Fault(
        "codes count as computed by the module that runs while they are made",
        "module=(original or birth).module",
        "module=birth.module",
        ("tests/trace/test_account.py", "-k", "codes"),
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
        "the backward of a linear is computed under the autocast around it",
        "        if not any_autocast_enabled():\n            return backward(ctx, dy)",
        "        if True:\n            return backward(ctx, dy)",
        ("tests/kernels/linear/test_linear.py", "-k", "under_autocast"),
    ),
    Fault(
        "an attribute that changed after the patch does not count",
        "elif now is not value and not _is_same(now, value):\n                return False",
        "elif now is Missing:\n                return False",
        ("tests/patches/test_changed_later.py",),
    ),
    Fault(
        "checkpointed block: lent weights are not put back for its second run",
        "            elif now[i] is not value and (isinstance(value, CONTAINERS) or not _is_same(now[i], value)):",
        "            elif isinstance(value, CONTAINERS) or not (isinstance(value, Tensor) or _is_same(now[i], value)):",
        ("tests/patches/test_runs_twice.py",),
    ),
    Fault(
        "checkpointed block: the second run draws other numbers of Python and NumPy",
        "            in_states(self._generators, self._random),",
        "            nullcontext(),",
        ("tests/patches/test_runs_twice.py",),
    ),
    Fault(
        "checkpointed block: another part of the forward reads its keys from a cache",
        "    return [block for block in plan.sites.blocks if block not in plan.sites.read_through_caches]",
        "    return [*plan.sites.blocks]",
        ("tests/walk/flow/test_caches.py",),
    ),
    Fault(
        "checkpointed block: a cache given by position is kept",
        "    return function, tuple(values[len(keywords) :])",
        "    return function, args",
        ("tests/patches/test_runs_twice.py",),
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
    Fault(
        "what libraries print reaches the terminal raw",
        'text = found[1] + printable(found[2], "\\n\\t") + found[3]',
        "pass",
        ("tests/cli/test_hostile.py", "-k", "stream_raw or bar"),
    ),
    Fault(
        "a line break in a name starts a line of the result",
        'print(*map(printable, lines), sep="\\n")',
        'print(*lines, sep="\\n")',
        ("tests/cli/test_hostile.py", "-k", "stream_raw or folders"),
    ),
    Fault(
        "tables reach the terminal raw",
        'yield Segment(text if control else printable(text, "\\n"), style, control)',
        "yield Segment(text, style, control)",
        ("tests/cli/test_hostile.py", "-k", "stream_raw"),
    ),
    Fault(
        "JSON holds what a terminal obeys",
        'return text if text.replace("\\n", "").isprintable() else json.dumps(finite, indent=2)',
        "return text",
        ("tests/cli/test_hostile.py", "-k", "json"),
    ),
    Fault(
        "load does not look whether the files fit",
        'if verify or any(directory.glob("*.safetensors")):',
        "if verify and False:",
        ("tests/checkpoint/test_fits.py",),
    ),
    Fault(
        "load compares no digests",
        "            wrong += _changed(manifest, source)\n",
        "            pass\n",
        ("tests/checkpoint/test_fits.py",),
    ),
    Fault(
        "the source's config is not pinned",
        "wrong = _changed(source, pinned, {})",
        "wrong = list[str]()",
        ("tests/checkpoint/test_fits.py",),
    ),
    Fault(
        "a recipe's anchors may double without end",
        "if len(level) > _MAX_YAML_ITEMS:",
        "if False:",
        ("tests/fuzz/test_readers.py", "-k", "no_parser and often"),
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
        "if not torch.allclose(_sums(each), was, rtol=0, atol=0, equal_nan=True):",
        "if False:",
        ("tests/patches/test_experts_again.py", "-k", "error_in_every_step"),
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
        "compares = values and (snapshot.is_late or snapshot.is_on_cpu)",
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
        "a gated norm whose rows depend on each other runs by pieces",
        'by_rows = kind in ("gated", "other") and copy.is_by_rows(*inputs)',
        'by_rows = kind in ("gated", "other")',
        ("tests/walk/probes/test_probe.py", "-k", "gated"),
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
        "the tokens of images are added to those of a row",
        "    if images:\n        length -= middle.shape[1]\n",
        "",
        ("tests/trace/test_images.py", "-k", "asked_for"),
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
        "a limit of the allocator is asked for without the byte that rounding takes",
        "set_per_process_memory_fraction({self.reserved + 1} /",
        "set_per_process_memory_fraction({self.reserved} /",
        ("tests/prediction/test_peak.py",),
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
