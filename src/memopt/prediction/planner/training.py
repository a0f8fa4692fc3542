"""The planner's functions: from a model id, a folder or a model in memory to a choice or a frontier."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from memopt.environment.generators import generators_kept
from memopt.errors import ModelError, UsageError
from memopt.patches.base import Effect
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe
from memopt.prediction.cards import USUAL_CARD, Card, find_card, setup_on
from memopt.prediction.optimizers import Form
from memopt.prediction.peak import MARGIN
from memopt.prediction.planner.choice import Choice, Frontier
from memopt.prediction.planner.levels import levels_of
from memopt.prediction.planner.plan import Task, choose, frontier_of, recipes_with
from memopt.prediction.setup import Run, Setup
from memopt.prediction.sharding import step_of_device
from memopt.prediction.subject import default_seq, reads_tokens, step_of
from memopt.trace.arguments import DTYPES, PRECISIONS
from memopt.trace.events import Parameter, Trace
from memopt.trace.quantised import quantisation_of
from memopt.trace.trace import parameters_of
from memopt.trace.tracer import Tracer, trace_ahead
from memopt.trace.training import ALL_LINEAR, Adapters, Precision, Request, Step, Training, has_16_bits
from memopt.walk.models.attention import Implementation
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import is_own_code, trust_code
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites


@generators_kept()
def plan_training(
    request: Request,
    budget: str | int | None = None,
    *,
    card: str | None = None,
    setup: Setup | None = None,
    allow: Sequence[Effect] = (),
) -> Choice | Frontier:
    """The fastest plan for training a model that fits into `budget`; without one, the frontier of memory against time.

    Computed from the config alone. Raises the errors of `memopt.report`, and those listed below.

    Args:
        request: the model, how it is trained, and the recipe that a plan changes.
        budget: memory of the device, all of it usable: ``24GiB``, ``24GB``, the name of a card, or a number of bytes.
        card: name of the card whose rates are used; by default the card that `budget` names.
        setup: optimizer, devices and allocator.
        allow: ``approximate``: shipped recipes whose gradients are off by a bounded error may be taken.

    Raises:
        NegativeVerdict: nothing fits; the message gives the bytes of the smallest plan.
        UsageError: `budget` or `card` is not known.
    """
    rates = find_card(card or (budget if isinstance(budget, str) else USUAL_CARD))
    setup = replace(setup or Setup(), memory=None if budget is None else _size(budget))
    of = step_of_device(step_of(request), setup)
    task = _task(str(request.model), of, setup, rates)
    found = frontier_of(task) if budget is None else choose(task, _size(budget), approximate=recipes_with(*allow))
    return replace(found, notes=(*of.notes, *make_plan(of.sites, of.rules).idle))


def _plan_step(name: str, of: Step, budget: str | int, setup: Setup, parameters: Sequence[Parameter]) -> Choice:
    """The fastest plan for a model with these parameters and buffers, whatever its config implies. Raises a ModelError
    if the traced step trains other parameters than the adapters of the model."""
    rates = find_card(budget if isinstance(budget, str) else USUAL_CARD)
    of = step_of_device(of, setup)
    task = _task(name, of, replace(setup, memory=_size(budget)), rates)
    own = task.predicted(task.levels.recipe, of.training.batch, 1)
    if of.adapters is not None and _forms(own.trace.parameters) != _forms(parameters):
        raise ModelError(
            f"The adapters of {name} are trained in another way than the step that was traced for the budget.",
            "Pass a recipe instead of a budget.",
        )
    held, traced = (sum(each.nbytes for each in those) for those in (parameters, own.trace.parameters))
    context = own.setup.context + held - traced
    return choose(replace(task, setup=replace(task.setup, context=context), keeps_batch=True), _size(budget))


def _task(name: str, of: Step, setup: Setup, card: Card) -> Task:
    levels = levels_of(of.sites, of.rules.unfolded())
    extends: bool | None = None

    def traced(rules: Recipe, rows: int) -> Trace:
        nonlocal extends
        tracer = Tracer(replace(of, recipe=rules), extends)
        training = replace(of.training, batch=rows)
        trace_ahead(tracer, training)
        found = tracer.at(training)
        # The first trace is the recipe's own step. Later ones have the same blocks, some at other levels.
        extends = tracer.extends if extends is None else extends
        return found

    setup, splits = setup_on(card, setup), of.inputs is None
    return Task(name, of.training, setup, card, levels, traced, splits=splits, margin=MARGIN)


def _size(budget: str | int) -> int:
    if isinstance(budget, str):
        return find_card(budget).memory
    if type(budget) is not int or budget <= 0:
        raise UsageError(f"A budget is a number of bytes, a size or a card, not {budget!r}.", "Give '24GiB', for one.")
    return budget


def plan_model(
    model: nn.Module,
    budget: str | int,
    recipe: Recipe,
    *,
    batch: int | None = None,
    seq: int | None = None,
    run: Run | None = None,
) -> Choice:
    """The fastest plan with which `model` trains: in its dtype, with its adapters, whatever their configs say, and with
    checkpointing if that is on. Frozen weights stay frozen.

    Args:
        budget: memory of the device: ``24GiB``, the name of a card, or a number of bytes.
        recipe: the recipe that the plan changes.
        batch: rows in a batch, by default 1.
        seq: tokens in a row, by default the limit in the config, but at most 2048.
        run: how a trainer runs the steps, by default with fused AdamW on one device, without autocast.

    Raises:
        ModelError: `model` has no transformers config that it can be traced from, or adapters other than LoRA's,
            or its adapters cannot be traced.
        NegativeVerdict: nothing fits.
    """
    base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if base is None:
        raise ModelError(
            f"A budget needs a transformers model, and {type(model).__name__} holds none.", "Pass a recipe instead."
        )
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    if is_own_code(type(base)):
        trust_code(config)  # it runs already
    parameters = list(parameters_of(model))
    weights = Counter[torch.dtype]()
    for each in parameters:
        weights[each.dtype] += each.nbytes
    known = (PRECISIONS[dtype] for dtype, _ in weights.most_common() if dtype in PRECISIONS)
    precision: Precision = next(known, "bf16")
    runs, stock = config._attn_implementation, build_meta(config, dtype=DTYPES[precision][0])
    attention = runs if runs in get_args(Implementation) and runs != stock.config._attn_implementation else None
    sites = find_sites(stock, attention=recipe.runs_attention or attention)
    adapters = _adapters(model, base, sites)
    plain: Any = None if adapters is None else next(iter(adapters.configs.values()))
    adapted = [name for name, module in base.named_modules() if getattr(module, "lora_A", None)]
    if adapters is not None and not adapted:
        raise ModelError(
            f"A budget is for LoRA or full fine-tuning, and {type(plain).__name__} is neither.",
            "Pass a recipe instead.",
        )
    run = run or Run()
    if run.autocast is not None and precision == "fp32":
        precision = "bf16-mixed" if run.autocast == "bf16" else "fp16-mixed"
    elif run.autocast == precision == "bf16":
        precision = "bf16-autocast"
    # transformers has renamed its property for this, and warns about the old name.
    checkpoints = run.checkpointing or any(getattr(each, "gradient_checkpointing", False) for each in base.modules())
    training = Training(
        batch=batch or 1,
        seq=(seq or default_seq(config)) if reads_tokens(config) else None,
        precision=precision,
        train="full" if adapters is None else "lora" if quantisation_of(config) is None else "qlora",
        lora_rank=getattr(plain, "r", 8),
        lora_targets=_short(adapted, sites) or (ALL_LINEAR,),
        lora_dropout=getattr(plain, "lora_dropout", 0.0),
        use_dora=getattr(plain, "use_dora", False),
        attention=attention,
        checkpointing="full" if checkpoints else "none",
        frozen=() if adapters is not None else _frozen(base, stock),
        adapter_fp32=has_16_bits(precision)
        and any(each.trained and each.dtype == torch.float32 for each in parameters),
    )
    step = Step(config, training, sites, recipe, adapters=adapters)
    return _plan_step(type(base).__name__, step, budget, run.setup, parameters)


def _adapters(model: nn.Module, base: nn.Module, sites: Sites) -> Adapters | None:
    """The adapters on `base`, the transformers model inside `model`; None if it has none."""
    configs = next((found for module in model.modules() if (found := getattr(module, "peft_config", None))), None)
    if configs is None:
        return None
    layers: list[Any] = [module for module in base.modules() if getattr(module, "lora_A", None)]
    active = layers[0].active_adapters if layers else ()
    modules = dict(base.named_modules())
    kinds: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    for block in (modules[name] for name in sites.blocks if name in modules):
        found = [(name, (tuple(each.shape), each.dtype), each.requires_grad) for name, each in block.named_parameters()]
        frozen = Counter(form for _, form, is_trained in found if not is_trained)
        kinds[frozenset(frozen.items())].add(frozenset(each for each in found if each[2]))
    return Adapters(
        dict(configs),
        tuple(active),
        frozenset(name for name, each in base.named_parameters() if each.requires_grad),
        all(len(kind) == 1 for kind in kinds.values()),
    )


def _frozen(model: nn.Module, stock: nn.Module) -> tuple[str, ...]:
    """The frozen parts of `model` that are in `stock`, built from its config, too: names of modules in which nothing is
    trained, and of parameters outside of them. Empty if nothing is trained, as before adapters are added."""
    known = dict(stock.named_parameters())
    floats = {name: each for name, each in model.named_parameters() if name in known and each.is_floating_point()}
    trained = [name for name, each in floats.items() if each.requires_grad]
    around = {name[:at] for name in trained for at, letter in enumerate(name) if letter == "."}
    found = dict[str, None]()
    for name in floats.keys() - trained if trained else ():
        ends = [at for at, letter in enumerate(name) if letter == "."]
        found[next((name[:at] for at in ends if name[:at] not in around), name)] = None
    return tuple(sorted(found))


def _forms(parameters: Iterable[Parameter]) -> Counter[Form]:
    """How many trained parameters have each shape and dtype."""
    return Counter((each.shape, each.dtype) for each in parameters if each.trained)


def _short(adapted: Sequence[str], sites: Sites) -> tuple[str, ...]:
    """The last parts of the modules' names if they name no other linear, else the whole names."""
    last = {name.rpartition(".")[2] for name in adapted}
    alike = {site.module for site in sites.linears if site.module.rpartition(".")[2] in last}
    return tuple(sorted(last)) if alike == set(adapted) else tuple(adapted)
