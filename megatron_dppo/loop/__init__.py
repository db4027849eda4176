"""The run on one trainer rank: the only layer that sees trainer, engine, data and metrics together."""

from megatron_dppo.loop.run import run_rank

__all__ = ["run_rank"]
