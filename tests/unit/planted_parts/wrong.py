"""A part that finds something wrong and then lacks something."""

from megatron_dppo.gpu_check.part import LackingError, at_most

SHOWS = "what is wrong"
LIMIT_S = 300.0


def run(site):
    yield at_most("error", float("nan"), 0.5)
    raise LackingError("the rest")
