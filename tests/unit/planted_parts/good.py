"""A part that finds all as it should be, and leaves a picture and a file."""

from megatron_dppo.gpu_check.part import Row, at_most

SHOWS = "what is well"
LIMIT_S = 100.0


def run(site):
    (site.folder / "curve.png").write_bytes(b"")
    (site.folder / "numbers.json").write_text("{}")
    yield at_most("error", 0.25, 0.5, " nats")
    yield Row("GPUs", str(site.gpus))
