"""An algorithm: a row of ``table.py`` together with the functions that the row names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_dppo.algorithms import projection, rules, sequence_rules, step_rules, table, triage
from megatron_dppo.algorithms.inputs import ANCHORS, Anchor, TokenInputs
from megatron_dppo.algorithms.rules import PENALTIES, Correction, Mask, Penalty, Weight
from megatron_dppo.algorithms.step_rules import StepBound


@dataclass(frozen=True)
class Algorithm(table.AlgorithmFacts):
    """The functions that the loss calls.

    Attributes:
        mask: True where a token trains (M).
        weight: w in M min(w, C) A grad log pi. C is ``ratio_cap``.
        step_bound: Computes a number from all tokens of an optimiser step. The mask reads the number. None for masks
            that read only the token and its response.
        penalties: Additive terms with their coefficients.
        correction: An additive term that belongs to this algorithm alone. None for most algorithms.
    """

    mask: Mask
    weight: Weight
    step_bound: StepBound | None
    penalties: tuple[tuple[float, Penalty], ...]
    correction: Correction | None = None

    @property
    def anchor(self) -> Anchor:
        """The policy that the mask compares pi with."""
        return ANCHORS[self.preset.anchor]

    def divergence(self, inputs: TokenInputs) -> Tensor | None:
        """Compute D of each token, float64, as the mask does. None for masks that measure no divergence."""
        if self.preset.divergence is None:
            return None
        return rules.measure_divergence(self.preset.divergence, inputs, self.anchor)


def build_algorithm(
    name: str, options: Mapping[str, Any] | None = None, settings: table.Settings = "stability"
) -> Algorithm:
    """Build the preset ``name`` with its functions.

    The arguments and the errors are the same as in ``algorithm_facts``.
    """
    facts = table.algorithm_facts(name, options, settings)
    preset = facts.preset
    numbers = facts.numbers
    anchor = ANCHORS[facts.preset.anchor]
    modules: Sequence[ModuleType] = (projection, rules, step_rules)
    if preset.sequences:
        modules = (sequence_rules, triage, *modules)
    mask = _function(modules, preset.mask)
    weight = _function(modules, preset.weight)
    step_bound = None
    if preset.step_bound is not None:
        function = _function(modules, preset.step_bound)
        step_bound = partial(function, **_numbers_of(facts, "step"))
    penalties = []
    for option, term in PENALTIES.items():
        coefficient = numbers.get(option)
        if coefficient:
            penalties.append((coefficient, term))
    correction = None
    if preset.correction is not None:
        function = _function(modules, preset.correction)
        correction = partial(function, anchor=anchor, **_numbers_of(facts, "correction"))
    algorithm = Algorithm(
        name=name,
        preset=preset,
        numbers=numbers,
        mask=partial(mask, anchor=anchor, **preset.fixed, **_numbers_of(facts, "mask", "both")),
        weight=partial(weight, anchor=anchor, **_numbers_of(facts, "weight", "both")),
        step_bound=step_bound,
        penalties=tuple(penalties),
        correction=correction,
    )
    for role in ("mask", "weight", "correction"):
        _require_parameters(name, role, getattr(algorithm, role))
    return algorithm


def _numbers_of(facts: table.AlgorithmFacts, *roles: str) -> dict[str, float]:
    """Return the numbers whose options have one of ``roles``."""
    return {n: x for n, x in facts.numbers.items() if facts.preset.option(n).role in roles}


def _function(modules: Sequence[ModuleType], function: table.RuleFunction) -> Callable[..., Any]:
    """Return ``function``, or the function with this name of the first module that has one."""
    if not isinstance(function, str):
        return function
    owner = next(module for module in modules if hasattr(module, function))
    return getattr(owner, function)


def _require_parameters(name: str, role: str, function: partial[Any] | None) -> None:
    """Raise ValueError if a call with the token inputs alone would lack a parameter, or pass an unknown one."""
    if function is None:
        return
    try:
        inspect.signature(function.func).bind(None, **function.keywords)
    except TypeError as error:
        raise ValueError(
            f"algorithm {name!r}: its {role} {function.func.__name__} is called with the token inputs and "
            f"{', '.join(function.keywords)}: {error}"
        ) from error
