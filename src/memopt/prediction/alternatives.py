"""Compare ways to train a model: the memory, FLOPs and bytes moved of each, and which of them fit a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from memopt.environment.forks import each
from memopt.errors import ModelError, UsageError
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe, load_recipe
from memopt.plan.shipped import EXACT
from memopt.prediction.cards import Card, check_attention, find_card, setup_on
from memopt.prediction.headline import Headline, Largest, Steps, Way, gib
from memopt.prediction.largest import MOST_ROWS, Scaled, fits, largest
from memopt.prediction.peak import MATTERS, Prediction, attention_remedy, combine, is_mask
from memopt.prediction.setup import GIB, Optimizer, Setup
from memopt.prediction.sharding import step_of_device
from memopt.prediction.subject import code_of, subject_of
from memopt.trace.estimate import has_table_of_positions, max_positions
from memopt.trace.events import Trace
from memopt.trace.tracer import Tracer, trace_ahead
from memopt.trace.training import Checkpointing, Request, Step, Train, Training, has_16_bits
from memopt.walk.models.build import build_meta

#: Lengths are searched in multiples of this, or of a part of it where the config allows few positions.
_STRETCH = 128
#: The longest sequence that is searched where the config's positions are no limit.
_MOST_TOKENS = 1 << 22
_COMPILE = (
    "Not in the table: torch.compile's activation_memory_budget, whose bytes are known only once the model is compiled "
    "(python -m benchmarks.compiled)."
)


def headline(
    request: Request,
    *,
    gpu: str | None = None,
    setup: Setup | None = None,
    step: Step | None = None,
    traces: Sequence[Trace | None] = (None, None),
    steps: Steps | None = None,
    longest: bool = False,
) -> Headline:
    """Whether a training step fits, what it needs, and other ways to train: the first lines of `memopt report`.

    Raises the errors of `memopt.report`, and those listed below.

    Args:
        request: the model and the step.
        gpu: name or size of a card: ``rtx4090``, ``24GiB``; without it, only the peaks are computed.
        setup: optimizer and devices, by default AdamW on one device.
        step: the step of `request`, if it is known.
        traces: the traces of this step, stock and patched, if they are known.
        steps: receives the progress of the work.
        longest: for every way, search the longest sequence instead of the largest batch; the recipe for long context is
            one of the ways.

    Raises:
        UsageError: the card is not known, or `longest` is used without a card, with inputs, or without token inputs.
    """
    card, setup = None if gpu is None else find_card(gpu), setup or Setup()
    if card is not None:
        check_attention(card, request.attention)
    if longest and (card is None or request.inputs is not None):
        hint = "Add gpu, e.g. rtx4090, and leave out inputs."
        raise UsageError("The longest sequence needs a card, and inputs of any length.", hint)
    if step is None:
        subject = subject_of(request)
        step = subject.step(subject.batch())
    setup = setup if card is None else replace(setup_on(card, setup), memory=card.memory)
    step = step_of_device(step, setup)  # a comparison's is one already, and so are its traces
    if longest and step.training.seq is None:
        raise UsageError("The model reads no tokens, so it has no longest sequence.", "Leave out longest.")
    positions = max_positions(step.config) if longest and has_table_of_positions(build_meta(step.config)) else None
    most, how = (positions or _MOST_TOKENS) if longest else 0, code_of(request, step.rules)
    answer = _Answer(step, setup, card, steps or Steps(""), most, how)
    return answer.headline(str(request.model), traces)


@dataclass(frozen=True)
class _Candidate:
    """One way to train."""

    name: str
    how: str
    tracer: Tracer
    training: Training
    setup: Setup

    @cached_property
    def _own(self) -> Prediction:
        """The prediction at its own size."""
        return combine(self.tracer.at(self.training), self.setup)

    def at(self, *, batch: int | None = None, seq: int | None = None) -> Prediction:
        """The prediction at this size."""
        changed = replace(self.training, batch=batch or self.training.batch, seq=seq or self.training.seq)
        return self._own if changed == self.training else combine(self.tracer.at(changed), self.setup)


@dataclass
class _Answer:
    step: Step
    setup: Setup
    card: Card | None
    steps: Steps
    longest: int
    """The most tokens in the search for the longest sequence of every way; 0: no such search."""
    how: str
    """The code that applies the recipe of `step`."""
    stock_cost: tuple[int, int] = field(default=(0, 0), init=False)
    extends: bool | None = field(default=None, init=False)
    """Whether blocks may be left out of traces of the patched model (`Tracer.extends`), and so of the other ways."""
    left_out: list[str] = field(default_factory=list, init=False)
    """Notes on ways that cannot be traced."""

    def headline(self, source: str, traces: Sequence[Trace | None]) -> Headline:
        step, training, card = self.step, self.step.training, self.card
        patched = self.candidate("memopt", step.rules, training.checkpointing)
        stock = self.candidate("stock", None, training.checkpointing)
        # The step itself, then every way to train.
        self.steps.now, self.steps.total = 1, 1 + (2 + len(list(self._others())) if self.card else 0)
        if self.card:  # without a card there are two small traces, which are not worth a fork
            trace_ahead(patched.tracer, training, (stock.tracer, training))
        else:  # with a card, the tracer needs its own traces of few blocks, to find out if blocks may be left out
            for candidate, traced in zip((stock, patched), traces, strict=True):
                if traced is not None:
                    candidate.tracer.traces[candidate.training] = traced
        patched.at()
        self.extends = patched.tracer.extends
        # Blocks of a stock model may be alike even if the blocks of the patched model are not.
        stock.tracer.extends = self.extends or None
        self.stock_cost = _cost(stock.at())
        others = list(self._others()) if self.card else []
        ways = self._ways((stock, patched, *others))
        others = [each for each in others if each.name in ways]
        remedies = () if self.card is None else self._remedies(stock, patched, others, ways)
        after = patched.at()
        limits = (f"Allocator, {way.name}: {way.allocator}." for way in ways.values() if way.allocator)
        notes = (*make_plan(step.sites, step.rules).notes, *step.notes, *after.assumptions, *self.left_out, *limits)
        return Headline(
            source,
            step.sites.model_class,
            step.rules.name,
            f"{training}, {self.setup}",
            ways[stock.name],
            ways[patched.name],
            card=None if card is None else card.name + card.is_named * f" ({card.memory / GIB:.2f} GiB usable)",
            memory=None if card is None else card.memory,
            others=tuple(ways[each.name] for each in others),
            remedies=tuple(dict.fromkeys(remedies)),
            notes=tuple(dict.fromkeys((*notes, *self._remarks(after)))),
            approximate=bool(step.rules.effects),
        )

    def candidate(self, name: str, recipe: Recipe | None, checkpointing: Checkpointing, **training: str) -> _Candidate:
        way = self.step.stock if recipe is None else replace(self.step, recipe=recipe)
        extends = self.extends if recipe is not None else self.extends or None
        tracer = Tracer(way, extends)
        steps = []
        if recipe is not None:
            steps.append(self.how if recipe is self.step.rules else f'memopt.patch(model, "{recipe.name}")')
        if checkpointing == "full":
            steps.append("gradient_checkpointing=True")
        changed = replace(way.training, checkpointing=checkpointing, **training)  # type: ignore[arg-type]
        return _Candidate(name, " and ".join(steps), tracer, changed, self.setup)

    def _others(self) -> Iterator[_Candidate]:
        rules, checkpointed = self.step.rules, self.step.training.checkpointing == "full"
        if not checkpointed:
            yield self.candidate("stock + checkpointing", None, "full")
            if not rules.effects:
                yield self.candidate("memopt, levels", load_recipe("exact-levels"), "none")
            yield self.candidate("memopt + checkpointing", rules, "full")
        if self.longest and not rules.effects and self.step.sites.blocks:
            for name, (settings, how) in _LONG_CONTEXT.items():
                yield replace(self.candidate(name, load_recipe("long-context", settings), "none"), how=how)
        if rules.name != "int8":
            yield self.candidate("memopt, int8", load_recipe("int8"), self.step.training.checkpointing)

    def _ways(self, candidates: Sequence[_Candidate]) -> dict[str, Way]:
        def work(candidate: _Candidate) -> tuple[Way | ModelError, Trace | None]:
            is_known = candidate.training in candidate.tracer.traces
            try:
                way = self.way(candidate)
                # Remedies read the traces of ways that do not fit. A trace takes seconds to get out of a fork.
                is_read = not is_known and self.card is not None and not way.fits(self.card.memory)
                return way, candidate.at().trace if is_read else None
            except ModelError as error:
                if candidate.name in ("stock", "memopt"):
                    raise
                return error, None

        steps = [partial(work, candidate) for candidate in candidates]
        # Without a card there are no searches, so no forks.
        found = each(steps, self._begin) if self.card else [do() for do in steps]
        ways = {}
        for candidate, (way, traced) in zip(candidates, found, strict=True):
            if traced is not None:
                candidate.tracer.traces[candidate.training] = traced
            if isinstance(way, Way):
                ways[candidate.name] = way
            else:
                self.left_out.append(f"Not in the table: {candidate.name}. {way.message}")
        return ways

    def _begin(self, number: int) -> None:
        self.steps.now = 2 + number

    def way(self, candidate: _Candidate) -> Way:
        found = candidate.at()
        (flops, moved), recipe = _cost(found), candidate.tracer.of.recipe
        return Way(
            candidate.name,
            candidate.how,
            found.total,
            found.margin,
            found.peak.nbytes,
            found.peak.moment,
            found.peak.where,
            {str(part): size for part, size in found.peak.parts.items()},
            flops / max(1, self.stock_cost[0]),
            moved / max(1, self.stock_cost[1]),
            recipe.gradient_error if recipe else 0.0,
            batch=self._batch(candidate),
            seq=self._seq(candidate) if self.longest or candidate.name in ("stock", "memopt") else None,
            allocator=found.limit_advice,
            accuracy=recipe.accuracy if recipe else EXACT,
        )

    def _batch(self, candidate: _Candidate) -> Largest | None:
        if self.card is None or self.step.inputs is not None or self.longest:
            return None
        rows = self.step.training.batch
        return self._largest(candidate, lambda n: candidate.at(batch=n), rows, max(rows, MOST_ROWS))

    def _seq(self, candidate: _Candidate) -> Largest | None:
        now = self.step.training.seq
        if self.card is None or self.step.inputs is not None or now is None:
            return None
        most = max(now, self.longest or max_positions(self.step.config) or 1 << 17)
        stretch = max(1, min(_STRETCH, most // 8))
        start, end = max(1, now // stretch), most // stretch
        found = self._largest(candidate, lambda n: candidate.at(seq=n * stretch), start, end, by_length=True)
        is_whole = found.is_all and most % stretch and candidate.at(seq=most).needs <= self.card.memory
        tokens = most if is_whole else found.value * stretch
        return replace(found, value=tokens, is_all=found.is_all and self.longest in (0, _MOST_TOKENS))

    def _largest(
        self, candidate: _Candidate, at: Callable[[int], Prediction], start: int, most: int, *, by_length: bool = False
    ) -> Largest:
        assert self.card is not None
        known: dict[int, Prediction] = {}

        def need(number: int) -> int:
            known[number] = at(number)
            return known[number].needs

        @cache
        def sketched(number: int) -> Scaled:
            others = (each for size, each in known.items() if size != number)
            return Scaled(known[number], others, by_length=by_length)

        try:
            found = largest(need, self.card.memory, start=start, most=most, sketched=sketched)
        except ModelError:  # the model refuses this size
            if not known:
                raise
            fits = (number for number, each in known.items() if each.needs <= self.card.memory)
            found = Largest(max(fits, default=0), is_all=True)
        near = min(known, key=lambda number: abs(number - found.value))
        for size in candidate.tracer.traces.keys() - {candidate.training}:  # a long step has millions of events
            del candidate.tracer.traces[size]
        return replace(found, offloaded=known[near].offloaded * found.value // near)

    def _remedies(
        self, stock: _Candidate, patched: _Candidate, others: list[_Candidate], ways: dict[str, Way]
    ) -> Iterator[str]:
        assert self.card is not None
        now = ways[patched.name]
        if (first := self._remedy(stock, patched, others, ways)) != "":
            yield first
        if not now.fits(self.card.memory) and ways[stock.name].fits(self.card.memory):
            yield f"without memopt it fits: {gib(ways[stock.name].total)}"
        if now.fits(self.card.memory):
            return
        yield from attention_remedy(patched.at(), self.step)
        masks = sum(each.nbytes for each in patched.at().peak.alive if is_mask(each))
        rules = self.step.rules
        if masks > MATTERS * now.peak:
            seeded = self.candidate("", load_recipe(rules, ("dropouts.method=seed",)), self.step.training.checkpointing)
            if (found := seeded.at()).peak.nbytes < now.peak:
                yield (
                    f"--set dropouts.method=seed: {gib(found.total)}; {gib(masks)} at the peak are dropout masks (the "
                    "same distribution, other random numbers)"
                )

    def _remedy(self, stock: _Candidate, patched: _Candidate, others: list[_Candidate], ways: dict[str, Way]) -> str:
        assert self.card is not None
        memory, now = self.card.memory, ways[patched.name]
        exact = sorted((ways[each.name] for each in others if ways[each.name].how), key=lambda way: way.flops)
        exact = [way for way in exact if way.accuracy == EXACT and way.name.startswith("memopt")]
        if now.fits(memory):
            for way in exact:
                if way.batch and now.batch and way.batch.value > now.batch.value:
                    return f"{way.name}: batch {way.batch} for {_more(way, now)}; {way.how}"
            return ""
        for way in exact:
            if way.fits(memory):
                return f"{way.name} fits: {gib(way.total)}, {_more(way, now)}, exact; {way.how}"
        for settings, how in _LONG_CONTEXT.values() if self.step.sites.blocks and not self.step.rules.effects else ():
            long = self.candidate("", load_recipe("long-context", settings), "none")
            if fits(long.at, memory):
                found, host = long.at(), gib(long.at().offloaded)
                return f"recipe long-context fits: {gib(found.total)}, and {host} of CPU memory, exact; {how}"
        by_name = {each.name: each for each in others}
        best = by_name.get("memopt + checkpointing", patched)
        of_stock = by_name.get("stock + checkpointing", stock)
        pairs = ((patched, stock), (best, of_stock)) if best is not patched else ((patched, stock),)
        for steps in zip(*(self._further(way) for pair in pairs for way in pair), strict=True):
            words = steps[0][0]
            for (_, candidate), (_, twin) in zip(steps[::2], steps[1::2], strict=True):
                if fitting := [each for each in (twin, candidate) if fits(each.at, memory)]:
                    better = min(fitting, key=lambda each: each.at().total)
                    said = f"{better.name} with {words} fits: {gib(better.at().total)}"
                    return "; ".join(filter(None, (said, better.how, better.at().limit_advice)))
        int8 = ways.get("memopt, int8")
        if int8 is not None and int8.fits(memory):
            return f"int8 fits: {gib(int8.total)}, approximate; {int8.how}"
        shorter = self._seq(best)
        if shorter is not None and shorter.value:
            return f"{best.name} fits with --seq {shorter.value} and batch {self.step.training.batch}"
        if (fewer := ways[best.name].batch) is not None and fewer.value:
            return f"{best.name} fits with --batch {fewer.value}"
        least = min(ways.values(), key=lambda way: way.needs)
        if patched.at().context >= memory:
            return f"nothing fits: the CUDA context alone takes {gib(patched.at().context)}; a larger card"
        needs, weights = gib(least.needs), gib(least.by_what()["weights"])
        instead = "a larger card, or --devices N --sharding fsdp"
        return f"nothing fits: {least.name} needs {needs}, of which weights are {weights}; {instead}"

    def _further(self, best: _Candidate) -> Iterator[tuple[str, _Candidate]]:
        """Further ways to train, from the smallest change to the largest."""
        setup = self.setup
        if setup.optimizer == "adamw-foreach":
            yield "--optimizer adamw-fused", replace(best, setup=replace(setup, optimizer="adamw-fused"))
        if not setup.expandable_segments:
            expandable = replace(setup, expandable_segments=True)
            yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", replace(best, setup=expandable)
        if best.training.train == "full" and setup.may_release(best.training.precision):
            how = " and ".join(filter(None, (best.how, "memopt.release_gradients(optimizer)")))
            released = replace(best, setup=replace(setup, release_gradients=True), how=how)
            yield "--release-gradients (no clipping)", released
        lighter: tuple[Optimizer, ...] = ("adamw8bit", "adafactor")
        if setup.optimizer.startswith("adamw-f") and not setup.sharding.startswith("zero"):
            for name in lighter:
                yield f"--optimizer {name}", replace(best, setup=replace(setup, optimizer=name))
        lighter_still: dict[Train, tuple[Train, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
        adapters, dora = has_16_bits(best.training.precision), best.training.use_dora
        for train in () if dora else lighter_still[best.training.train]:  # DoRA is not traced on 4-bit weights
            training = replace(best.training, train=train, adapter_fp32=adapters)
            yield f"--train {train}", replace(best, tracer=replace(best.tracer), training=training)

    def _remarks(self, found: Prediction) -> Iterator[str]:
        includes = "" if self.card is None else "; 'needs' is the peak and this margin, and 'fits' goes by it"
        yield f"Margin: {found.margin / found.reserved:.0%} of the allocator's reserved bytes{includes}."
        positions, most = max_positions(self.step.config), max(self.longest, self.step.training.seq or 0)
        if positions is not None and (self.longest or most > positions):
            beyond = "beyond them it needs RoPE scaling, say" if most > positions else "it takes no more"
            yield f"Lengths: the model was made for {positions} positions; {beyond}."
        if self.card is None:
            return
        if not self.card.is_named:
            yield "Card: all of the size given; a named card (--gpu rtx4090) has less, because its driver takes some."
        yield "FLOPs of products, and bytes that operations move, are relative to the stock step."
        yield _COMPILE


#: The recipe for long sequences, and a slower variant with less on the device: name -> (settings, code to apply it).
_LONG_CONTEXT: dict[str, tuple[tuple[str, ...], str]] = {
    "long-context": ((), 'memopt.patch(model, "long-context")'),
    "long-context, keep=none": (
        ("checkpointing.keep=none",),
        'memopt.patch(model, memopt.load_recipe("long-context", ["checkpointing.keep=none"]))',
    ),
}


def _cost(found: Prediction) -> tuple[int, int]:
    operations = found.trace.operations
    return sum(each.flops for each in operations), sum(each.nbytes for each in operations)


def _more(way: Way, now: Way) -> str:
    return f"{100 * (way.flops / now.flops - 1):.0f} % more FLOPs" if now.flops else "more FLOPs"
