"""A part that lacks something after it saw a little."""

from megatron_dppo.gpu_check.part import LackingError, Row

SHOWS = "what is not here"
LIMIT_S = 110.0


def run(site):
    yield Row("a little", "seen")
    raise LackingError("no second GPU")
