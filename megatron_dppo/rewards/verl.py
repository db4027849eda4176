"""Call reward functions of verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.result import RewardResult
from megatron_dppo.system.imports import ImportTargetError, import_target


class ComputeScore:
    """Calls verl's function with the columns of verl's data files.

    ``data_source`` and ``extra_info`` are columns of the problem's record; the file needs ``metadata_key: "*"`` for
    them. If the function returns a dictionary, its ``score`` is the reward, and its other numbers are components of the
    reward.

    Args:
        function: ``package.module:function`` with verl's four parameters.
        arguments: further keyword arguments, as verl's ``custom_reward_function.reward_kwargs``.
    """

    def __init__(self, function: str, arguments: Mapping[str, Any] | None = None) -> None:
        try:
            self._function = import_target(function)
        except ImportTargetError as error:
            raise ValueError(f"function: {function!r} can't be imported: {error}") from error
        self._arguments = dict(arguments or {})

    def __call__(self, record: RewardInput) -> RewardResult | float:
        metadata = record.metadata
        if "data_source" not in metadata:
            raise ValueError(
                f"the problem's metadata has {sorted(metadata)}, expected verl's column 'data_source'; set the file's "
                "metadata_key: '*'"
            )
        result = self._function(
            data_source=metadata["data_source"],
            solution_str=record.response,
            ground_truth=record.answer,
            extra_info=metadata.get("extra_info"),
            **self._arguments,
        )
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            raise ValueError(f"verl's function returned {sorted(result)}, expected a 'score' in it")
        components: dict[str, float] = {}
        for name, value in result.items():
            if name != "score" and isinstance(value, Real):
                components[str(name)] = float(value)
        return RewardResult(result["score"], components)
