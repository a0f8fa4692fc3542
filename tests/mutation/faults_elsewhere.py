"""Faults of the walk, checkpoints, verification, reports and the command line."""

from __future__ import annotations

from tests.mutation.fault import Fault

_FOLDS = ("tests/checkpoint",)
_ATOMIC = ("tests/checkpoint/test_atomic.py",)
_LEVELS = ("tests/verification/test_levels.py",)
_REPORT = ("tests/trace/test_account.py",)
_FAMILIES = ("tests/walk/test_families.py", "tests/walk/test_toys.py")
_SCENARIOS = "tests/device/numeric/test_scenarios.py"
_SHRINK = ("tests/walk/models/test_shrink.py", "tests/walk/models/test_shrink_rest.py")

ELSEWHERE: tuple[Fault, ...] = (
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
        'foreign = sorted({"".join(name.partition("/")[:2]) for name in found '
        "if name not in records and name != MANIFEST})",
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
        "codes count as computed by the module that runs while they are made",
        "module=(original or birth).module",
        "module=birth.module",
        ("tests/trace/test_account.py", "-k", "codes"),
    ),
    Fault(
        "checkpointed block: another part of the forward reads its keys from a cache",
        "    return [block for block in plan.sites.blocks if block not in once]",
        "    return [*plan.sites.blocks]",
        ("tests/walk/flow/test_caches.py",),
    ),
    Fault(
        "checkpointed block: an argument of it is changed in place",
        "elif block in observed.mode.overwritten:",
        "elif False:",
        ("tests/patches/test_checkpointing.py", "-k", "run_once"),
    ),
    Fault(
        "norm: its input is saved although it is changed in place later",
        "keeps_input = site.executed and not site.input_changes and not reads_x_hat",
        "keeps_input = site.executed and not reads_x_hat",
        ("tests/patches/test_norm.py",),
    ),
    Fault(
        "norm without weights: its output, which is changed in place, is what it saves",
        "copies = site.output_changes or leaves or not site.executed",
        "copies = leaves or not site.executed",
        ("tests/patches/test_changed_in_place.py", "-k", "without_weights"),
    ),
    Fault(
        "activation: it runs again from an input that is changed in place",
        "if site.is_module and site.operations > 1 and site.name in plan.sites.overwritten:",
        "if False:",
        ("tests/patches/test_changed_in_place.py", "-k", "have_read"),
    ),
    Fault(
        "function: it runs again with an argument that is changed in place",
        "if inner or call[:2] in changed or not _saves_much",
        "if inner or not _saves_much",
        ("tests/patches/test_changed_in_place.py", "-k", "have_read"),
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
        "wrong = [name for name, _ in changed_files(pinned, source.root)]",
        "wrong = list[str]()",
        ("tests/checkpoint/test_fits.py",),
    ),
    Fault(
        "a recipe's anchors may double without end",
        "if len(level) > _MAX_YAML_ITEMS:",
        "if False:",
        ("tests/fuzz/test_readers.py", "-k", "no_parser and often"),
    ),
    Fault(
        "a gated norm whose rows depend on each other runs by pieces",
        'by_rows = kind in ("gated", "other") and copy.is_by_rows(*inputs)',
        'by_rows = kind in ("gated", "other")',
        ("tests/walk/probes/test_probe.py", "-k", "gated"),
    ),
    Fault(
        "the tokens of images are added to those of a row",
        "    if images:\n        length -= middle.shape[1]\n",
        "",
        ("tests/trace/test_images.py", "-k", "asked_for"),
    ),
    Fault(
        "a limit of the allocator is asked for without the byte that rounding takes",
        "set_per_process_memory_fraction({self.reserved + 1} /",
        "set_per_process_memory_fraction({self.reserved} /",
        ("tests/prediction/test_peak.py",),
    ),
)
