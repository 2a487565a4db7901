"""The one place where what a client sends is checked, before anybody believes it.

A task says what its answer may be: its recipe has a ``ReplySpec``. Whatever is not within it, or
cannot be read at all, becomes a ``Failure`` of that client with one sentence. Nothing here raises,
so one client costs its own update at most. Results of the local engine and messages of Flower's
nodes both pass here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from fedquilt.errors import FedquiltError, StructureError, UpdateError
from fedquilt.federation.client import Client, Failure, Task, Update, client_label
from fedquilt.federation.state import Setup
from fedquilt.federation.update import validate_update
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import Params, compute_shapes
from fedquilt.structure.structure import Structure, cache_per_structure
from fedquilt.structure.subnet import Subnet, prefix_mask

LOSS, EXAMPLES = "loss", "examples"  # what every training reports
HINTS = {EXAMPLES: "; if a function makes its data, num_examples is what it makes"}
MAX_EXAMPLES = 10**9  # that one client can have
MAX_LOSS = 1e6  # a mean over examples; what is above says that a net diverged, and nothing else
MAX_METRICS = 4096
MAX_CLIENTS = 10**6
MAX_CLASSES = 2**18  # or tokens, unless the settings say so themselves
MAX_NAME_LENGTH = 100
MAX_REASON_LENGTH = 1000  # characters of a sentence that came from a client
ROUNDING = 1e-3  # a sum of cross entropies may be that much below zero

Code = Mapping[str, tuple[torch.dtype, tuple[int, ...] | None]]  # None: any number of values


@dataclass(frozen=True)
class MetricSpec:
    """What a number that a client reports may be: from ``low`` to ``high``.

    A count is whole. ``of`` names another metric that it does not exceed, as hits are of examples.
    A metric that ``may_diverge`` may also be no finite number: whoever reads it has to look.
    """

    low: float = 0.0
    high: float = math.inf
    is_count: bool = False
    of: str | None = None
    may_diverge: bool = False
    is_required: bool = True


def loss_spec(low: float = 0.0) -> MetricSpec:
    """A training loss; ``low`` is the least that it can be."""
    return MetricSpec(low=low - ROUNDING, may_diverge=True)


def count_spec(high: int | None = None, *, low: int = 0, of: str | None = None) -> MetricSpec:
    """A number of examples, or of hits among them; None: as many as one client can have."""
    return MetricSpec(low=low, high=MAX_EXAMPLES if high is None else high, is_count=True, of=of)


@dataclass(frozen=True)
class ReplySpec:
    """What the answer to a task may be.

    ``subnets`` may come back: just these, each once, in their order. Tensors of a subnet may be
    left out, and rows of classes and tokens. With ``is_chosen`` the client chooses channels and
    blocks within them. With ``may_be_empty`` an answer of no subnets is one, too. ``weight`` is the
    most that the update may count. ``metrics`` are what may be reported; None: any numbers.
    ``code`` are tensors that come instead of those of all subnets, with their types and shapes, or
    None for any number of values. They go to the server as they are.
    """

    subnets: tuple[Subnet, ...]
    weight: float
    metrics: Mapping[str, MetricSpec] | None = field(default=None)
    is_chosen: bool = False
    may_be_empty: bool = False
    code: Code | None = None


def training_metrics(
    num_examples: int, min_loss: float = 0.0, **others: MetricSpec
) -> dict[str, MetricSpec]:
    """The metrics of a recipe that trains: its loss, on how many of the client's examples."""
    return {LOSS: loss_spec(min_loss), EXAMPLES: count_spec(num_examples), **others}


def get_reply_spec(task: Task, client: Client) -> ReplySpec:
    """What a task's answer may be: as its recipe says, or else as careful as can be.

    Of a recipe without ``reply_spec`` the answer weighs at most the client's number of examples.
    """
    own = getattr(task.recipe, "reply_spec", None)
    if own is None:
        weight = float(max(client.num_examples, 1))
        return ReplySpec(task.subnets, weight, is_chosen=True, may_be_empty=True)
    found: ReplySpec = own(task, client)
    return found


def validate_reply(
    setup: Setup,
    task: Task,
    result: Update | Failure,
    params: Params,
    *,
    decode: Callable[[Update], Update] = lambda update: update,
    check: Callable[[Update], None] = lambda update: None,
) -> Update | Failure:
    """Returns the decoded update if it is a valid reply to the task, else a failure that says why.

    Args:
        setup: What stays the same during the run.
        task: What the client was asked to do.
        result: What came back.
        params: The global tensors.
        decode: Turns what was sent into tensors.
        check: Raises an UpdateError if the decoded update breaks a rule of the method.
    """
    if isinstance(result, Failure):
        return Failure(task.client, shorten(result.reason))
    try:
        if result.client != task.client:
            raise UpdateError(
                f"{client_label(task.client)} was answered for by {client_label(result.client)}"
            )
        terms = get_reply_spec(task, _find_client(setup, task.client))
        terms = _allow_losses(terms, setup.task.loss.least)
        if terms.may_be_empty and not result.subnets:
            metrics = dict[str, MetricSpec]() if terms.metrics is not None else None
            terms = replace(terms, subnets=(), weight=0.0, metrics=metrics)
        _check_numbers(result, terms)
        _check_subnets(result, terms, setup.structure)
        if terms.code is not None:
            return _check_code(result, terms.code)
        update = validate_update(decode(result), setup.structure, params)
        check(update)
        return update
    except FedquiltError as problem:
        return Failure(task.client, shorten(str(problem)))
    except Exception as problem:  # whatever foreign values may do to those who read them
        return Failure(
            task.client,
            shorten(
                f"{client_label(task.client)} sent what cannot be read "
                f"({type(problem).__name__}: {problem})"
            ),
        )


def _allow_losses(terms: ReplySpec, least: float) -> ReplySpec:
    """The terms of a task whose loss may be less than zero: recipes know of cross entropy only."""
    if least >= 0 or terms.metrics is None:
        return terms
    metrics = {
        name: replace(spec, low=min(spec.low, least))
        if name == LOSS or name.startswith(f"{LOSS}:")
        else spec
        for name, spec in terms.metrics.items()
    }
    return replace(terms, metrics=metrics)


def _check_code(update: Update, code: Code) -> Update:
    """The update itself, if its tensors are a code of these types and shapes."""
    who = client_label(update.client)
    if len(update.params) != max(len(update.subnets), 1) or any(update.params[1:]):
        raise UpdateError(f"{who} sent {len(update.params)} sets of tensors instead of one code")
    tensors = update.params[0]
    if tensors.keys() != code.keys():
        raise UpdateError(f"{who} sent {sorted(tensors)!r:.60}, asked for were {sorted(code)}")
    for name, (dtype, shape) in code.items():
        given = tensors[name]
        if given.dtype != dtype or tuple(given.shape) != (shape or (given.numel(),)):
            raise UpdateError(
                f"{who} sent '{name}' as {given.dtype} {tuple(given.shape)}, asked for was {dtype} "
                f"{shape or 'of any length'}"
            )
    return update


def list_sent_subnets(task: Task) -> tuple[Subnet, ...]:
    """The subnets that the answer to a task has, if the client does not choose them by its data.

    These are the task's, unless its recipe has ``sent_subnets(task)``, which says otherwise.
    """
    own = getattr(task.recipe, "sent_subnets", None)
    return task.subnets if own is None else tuple(own(task))


def _find_client(setup: Setup, number: int) -> Client:
    """A client as it has registered; the server has the examples of all."""
    own = setup.clients_by_id.get(number)
    return own or Client(number, setup.registry.total_examples)


def validate_client(client: Client, num_classes: int) -> None:
    """Raises an UpdateError if what a client says about itself is out of range."""
    numbers = {
        "number": (client.id, 0, MAX_CLIENTS),
        "examples": (client.num_examples, 1, MAX_EXAMPLES),
        "tests": (client.num_tests or 0, 0, MAX_EXAMPLES),
        "classes": (num_classes, 1, MAX_CLASSES),
    }
    for name, (value, low, high) in numbers.items():
        if not low <= value <= high:
            raise UpdateError(f"a client's {name} are from {low} to {high}, it says {value:.6g}")
    labels = client.labels
    if list(labels) != sorted(set(labels)) or (
        labels and not 0 <= labels[0] <= labels[-1] < num_classes
    ):
        raise UpdateError(
            f"labels are numbers below {num_classes}, each once, it says {labels!r:.60}"
        )
    if not isinstance(client.budget, Budget) or not all(
        limit is None or (_is_number(limit) and math.isfinite(limit))
        for limit in vars(client.budget).values()
    ):
        raise UpdateError(f"a budget is a width and limits, it says {client.budget!r:.60}")
    if len(client.group) > MAX_NAME_LENGTH or not client.group.isprintable():
        raise UpdateError(f"a group is a short name, it says {client.group!r:.60}")


def shorten(reason: str) -> str:
    """A sentence from elsewhere, of a length that can be shown, in one line."""
    line = " ".join(reason[: 2 * MAX_REASON_LENGTH].split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[: MAX_REASON_LENGTH - 2]} …"


def _check_numbers(update: Update, terms: ReplySpec) -> None:
    who, weight = client_label(update.client), update.weight
    if weight > terms.weight * (1 + 1e-9):
        raise UpdateError(f"{who} sent the weight {weight:g}; its task allows {terms.weight:g}")
    if len(update.metrics) > MAX_METRICS:
        raise UpdateError(f"{who} reported {len(update.metrics)} numbers, at most {MAX_METRICS}")
    for name, value in update.metrics.items():
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _is_number(value):
            raise UpdateError(f"{who} reported {name!r:.100} as {value!r:.100}, which is no number")
    _check_metrics(
        who, update.metrics, _allow_any(update.metrics) if terms.metrics is None else terms.metrics
    )


def _allow_any(metrics: Mapping[str, float]) -> dict[str, MetricSpec]:
    """What a recipe may report that does not say so; a loss is of a number of examples."""
    known = dict.fromkeys(metrics, MetricSpec(-math.inf, may_diverge=True))
    return known | (training_metrics(MAX_EXAMPLES, -math.inf) if LOSS in metrics else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_metrics(who: str, given: Mapping[str, float], known: Mapping[str, MetricSpec]) -> None:
    for name in given:
        if name not in known:
            raise UpdateError(f"{who} reported '{name}', which its task does not ask for")
    for name, metric in known.items():
        if name not in given:
            if metric.is_required and (name == EXAMPLES or given.get(EXAMPLES) != 0):
                raise UpdateError(f"{who} did not report '{name}', which its task asks for")
            continue
        value = given[name]
        if metric.may_diverge and not math.isfinite(value):
            continue
        high = metric.high if metric.of is None else min(metric.high, given.get(metric.of, 0))
        is_whole = not metric.is_count or (math.isfinite(value) and value == int(value))
        if not (metric.low <= value <= high and is_whole):
            kind = "a whole number " if metric.is_count else ""
            raise UpdateError(
                f"{who} reported {value:g} as '{name}', which is {kind}from {metric.low:g} to "
                f"{high:g}{HINTS.get(name, '')}"
            )


def _check_subnets(update: Update, terms: ReplySpec, structure: Structure) -> None:
    who, came, asked = client_label(update.client), update.subnets, terms.subnets
    if len(came) != len(asked):
        raise UpdateError(f"{who} sent {len(came)} subnets, asked for were {len(asked)}")
    for subnet, wanted in zip(came, asked, strict=True):
        try:
            compute_shapes(structure, subnet)
            fits = _is_part(structure, subnet, wanted, is_chosen=terms.is_chosen)
        except StructureError as problem:
            raise UpdateError(f"{who} sent a subnet that does not fit: {problem}") from problem
        if not fits:
            raise UpdateError(
                f"{who} sent another subnet than it was asked for; was its model built at another "
                "width?"
            )


@cache_per_structure(max_entries=256)
def _is_part(structure: Structure, subnet: Subnet, wanted: Subnet, *, is_chosen: bool) -> bool:
    """Whether a subnet is what was asked for, or a part of it that may come instead.

    What is owned must be the same, as it decides which tensors of the model are meant.
    """
    if subnet == wanted:
        return True
    if (subnet.private, subnet.owner) != (wanted.private, wanted.owner):
        return False
    came, asked = dict(subnet.kept), dict(wanted.kept)
    if len(came) != len(subnet.kept):
        return False  # a group that is mentioned twice
    for name, group in structure.groups.items():
        whole = prefix_mask(group.size)
        mine, theirs = came.get(name, whole), asked.get(name, whole)
        if mine & ~theirs or (mine != theirs and group.is_cut and not is_chosen):
            return False
    skips, must = set(subnet.skipped), set(wanted.skipped)
    if not (skips >= must if is_chosen else skips == must):
        return False
    return set(structure.tensor_names(subnet)) <= set(structure.tensor_names(wanted))
