"""The doctor: references by version as they are needed, the diagnoses, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import load_tokenizer
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor import diagnosis
from megatron_dppo.diagnostics.doctor.diagnosis import (
    Alternative,
    Diagnosis,
    Draws,
    SampledRun,
    Side,
    TokenEvidence,
)
from megatron_dppo.diagnostics.doctor.ladder import Rung, log_probs_of, trainer_of
from megatron_dppo.diagnostics.doctor.reference import KnownWeights, Reference, at_temperature
from megatron_dppo.diagnostics.explain.__main__ import show as show_table
from megatron_dppo.diagnostics.explain.explanation import TokenTexts
from megatron_dppo.diagnostics.explain.page import response_block, tables_page, token_span
from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.rollout_figures import generated_figures, is_coarse, rows_of
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import progress

SHOWN, TOKENS, RESPONSES = 6, 12, 8
"""What is shown of a side: alternatives, the nearest first; tokens, the largest gaps first; on the page, the responses
that these are in."""
NEAREST = (-1, 1, -2, -4, -8)
"""Versions from a side's own that are tried as stale or too new, where the run has them."""
LAYOUT = "the same trainer in one process does not differ"


@dataclass(frozen=True)
class DoctorReport:
    """``texts``: of token ids. ``facts``: about the batch. ``unexamined``: why not, by side or what else it is."""

    batch: Sequence[Trajectory]
    diagnoses: Sequence[Diagnosis]
    draws: Draws | None
    prompt_faults: Sequence[str]
    texts: TokenTexts
    facts: Sequence[str]
    unexamined: Mapping[str, str]

    @property
    def conclusions(self) -> list[str]:
        """``findings``, or what agrees: only what was examined."""
        examined = [v.side for v in self.diagnoses]
        if self.findings or not examined:
            return self.findings or ["neither side was examined: nothing is known of them"]
        if not {"engine", "trainer"} & self.unexamined.keys():
            return ["nothing is wrong: both sides agree with the reference"]
        missing = " and ".join(side for side in self.unexamined if side in ("engine", "trainer"))
        return [
            f"{' and '.join(examined)}: nothing is wrong; the {missing} was not examined",
        ]

    @property
    def all_facts(self) -> list[str]:
        """``facts``, and what was not examined."""
        missing = [f"{name} not examined: {reason}" for name, reason in self.unexamined.items()]
        return [*self.facts, *missing]

    @property
    def findings(self) -> list[str]:
        """What is wrong, a line each; empty where nothing is."""
        lines = findings_of(self.diagnoses, self.draws)
        if self.prompt_faults:
            lines.append(
                f"tokenizer: {len(self.prompt_faults)} prompts differ; {self.prompt_faults[0]}"
            )
        return lines


def findings_of(diagnoses: Sequence[Diagnosis], draws: Draws | None) -> list[str]:
    """What is wrong with the sides and with how the tokens were drawn, a line each."""
    lines = [_sentence(v) for v in diagnoses if not v.is_healthy]
    if draws is not None and draws.are_copies:
        first, second = draws.copies[0]
        lines.append(
            f"seeds: {len(draws.copies)} pairs of equal responses in groups, "
            f"{draws.expected_copies:.2g} expected; responses {first} and {second} are equal"
        )
    elif draws is not None and draws.sampler is not None:
        lines.append(
            f"sampling: the {draws.tokens} tokens were drawn as by {draws.sampler} "
            f"(log likelihood ratio {draws.evidence:.0f})"
        )
    return lines


def _sentence(diagnosed: Diagnosis) -> str:
    if diagnosed.cause is None:
        return (
            f"{diagnosed.side}: unexplained, mean |p - reference| {diagnosed.gap:.1e} at version "
            f"{diagnosed.version}; no alternative comes near"
        )
    remaining = diagnosed.gaps[diagnosed.cause.name]
    return (
        f"{diagnosed.side}: {diagnosed.axis}: {diagnosed.cause.name} (mean |p - reference| {diagnosed.gap:.1e}, "
        f"{remaining:.1e} left of it)"
    )


@dataclass(frozen=True)
class Scores:
    """log p of the batch's tokens at one version: by the reference, and by each alternative."""

    vocab_size: int
    alternatives: Sequence[Alternative]
    plain: Sequence[Tensor]
    by_name: Mapping[str, Sequence[Tensor]]

    def at(self, positions: Sequence[int]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Of these trajectories."""
        by_name = {name: [v[i] for i in positions] for name, v in self.by_name.items()}
        return [self.plain[i] for i in positions], by_name


class Doctor:
    """The batch and the weights that are known; a reference is loaded when it is needed."""

    def __init__(
        self,
        config: TrainConfig,
        batch: Sequence[Trajectory],
        weights: KnownWeights,
    ) -> None:
        self._config, self._batch = config, batch
        self._run = SampledRun(config.temperature, config.parallel.tensor, config.parallel.expert)
        self._weights = weights
        self._scores: dict[tuple[int, bool], Scores] = {}
        self._unexamined: dict[str, str] = {}

    def report(self, step: int) -> DoctorReport:
        """Both sides of the batch of ``step`` against the reference, and its prompts."""
        diagnoses, draws = self.diagnose(step)
        prompt_faults: list[str] = []
        try:
            origin = RunData(self._config).origin()
            prompt_faults = diagnosis.prompt_faults(self._batch, origin)
            if origin.makes_prompts:
                self._unexamined["prompts"] = "the environment makes them"
        except (DataError, OSError) as error:
            self._unexamined["prompts"] = str(error)
        return DoctorReport(
            batch=self._batch,
            diagnoses=diagnoses,
            draws=draws,
            prompt_faults=prompt_faults,
            texts=TokenTexts(load_tokenizer(self._config.model.hf_checkpoint)),
            facts=[
                f"{self._config.model.dtype}, temperature {self._config.temperature:g}",
                *self._concentration(),
            ],
            unexamined=dict(self._unexamined),
        )

    def _concentration(self) -> list[str]:
        """How alike the responses of groups are, in words; nothing where the batch lacks TopK(mu)."""
        rows = rows_of(self._batch, self._config.rollout.group_size)
        value = generated_figures(rows).get(names.CONCENTRATION)
        if value is None:
            return []
        normal = names.METRICS[names.CONCENTRATION].normal
        assert normal is not None
        verdict = f"above {normal.high:g}: {normal.why}" if value > normal.high else "normal"
        return [f"{normal.label} {value:.3f}: {verdict}"]

    def diagnose(self, step: int) -> tuple[list[Diagnosis], Draws | None]:
        """Of each side, and of the draws."""
        examined = self._sides(step)
        if self._is_selected:
            self._unexamined["draws"] = "rewards or lengths chose among the responses"
        diagnoses = [self.examine(side) for side in examined]
        draws = self.draws(diagnoses, examined)
        if any(d.side == "engine" and d.is_healthy for d in diagnoses):
            diagnoses += self._recording(examined[0])
        return diagnoses, draws

    def _sides(self, step: int) -> list[Side]:
        """Those that can be examined."""
        config = self._config
        mini_batch = config.training.prompts_per_mini_batch * config.rollout.group_size
        engine, trainer = diagnosis.engine_side(self._batch), None
        if engine is None:
            self._unexamined["engine"] = "no response of the batch has one weight version alone"
        if config.lora.dropout:
            self._unexamined["trainer"] = "its pass has dropout (lora.dropout)"
        else:
            trainer = diagnosis.trainer_side(self._batch, step, mini_batch)
            if trainer is None:
                reason = "no response of the first mini-batch has its log-probabilities"
                self._unexamined["trainer"] = reason
        sides = [side for side in (engine, trainer) if side is not None]
        unknown = {
            side.name: self._weights.lacking(side.version)
            for side in sides
            if side.version not in self._weights.folders
        }
        self._unexamined |= unknown
        return [side for side in sides if side.name not in unknown]

    def examine(self, side: Side) -> Diagnosis:
        """What makes it differ. Raises OSError or ValueError where weights can't be read."""
        for every in (False, True):
            plain, by_name, chosen = self._scored(side, every=every)
            rounding = self._rounding(side.name)
            diagnosed = diagnosis.judge(side, self._batch, plain, by_name, chosen, rounding)
            if diagnosed.is_healthy:
                break
        if side.name == "trainer" and diagnosed.is_in_question:
            return self._without_layout(diagnosed, side, plain)
        return diagnosed

    def _scored(
        self, side: Side, *, every: bool
    ) -> tuple[list[Tensor], dict[str, list[Tensor]], list[Alternative]]:
        """log p of a side's tokens as it should say it, by each alternative, and these: those that say whether it is
        healthy, or ``every`` one."""
        scores = self._scores_of(side.version, every=every)
        plain, by_name = scores.at(side.positions)
        chosen = list(scores.alternatives)
        if side.name == "trainer" and self._config.router_replay and diagnosis.RECORDED in by_name:
            # What it should say: wherever the engine routed, right or wrong.
            sampling = at_temperature(self._config.temperature)
            chosen.append(Alternative("routing", diagnosis.NATURAL, sampling))
            plain, by_name = diagnosis.by_recording(plain, by_name)
            chosen = [c for c in chosen if c.name in by_name]
        return plain, by_name, chosen

    def _recording(self, engine: Side) -> list[Diagnosis]:
        """Whether an engine that computes what its weights say recorded the experts that it took: all others follow
        them. None where nothing is replayed."""
        scores = self._scores_of(engine.version, every=False)
        natural, by_name = scores.at(engine.positions)
        if not self._config.router_replay or diagnosis.RECORDED not in by_name:
            return []
        recorded, by_name = diagnosis.by_recording(natural, by_name)
        by_alternative = {name: by_name[name] for name in (diagnosis.ROUNDED, diagnosis.EIGHT_BITS)}
        chosen = [c for c in scores.alternatives if c.name == diagnosis.ROUNDED]
        side = replace(engine, name=diagnosis.RECORDING, log_probs=tuple(natural))
        rounding = self._rounding("engine")
        diagnosed = diagnosis.judge(side, self._batch, recorded, by_alternative, chosen, rounding)
        if not diagnosed.is_healthy:
            reference = self._weights.reference(engine.version)
            every = diagnosis.alternatives(self._run, reference, is_recorded=True)
            moved = [c for c in every if c.name in diagnosis.MOVED_RECORDINGS]
            for name, values in self._scores_by(reference, "moved recordings", moved).items():
                by_alternative[name] = [values[i] for i in engine.positions]
            chosen += moved
            diagnosed = diagnosis.judge(
                side, self._batch, recorded, by_alternative, chosen, rounding
            )
        return [diagnosed]

    def _rounding(self, side: str) -> str | None:
        """The alternative that is as coarse as a healthy side may be; None: it is in float32."""
        config = self._config
        if is_coarse(*((config.sglang, {}) if side == "engine" else ({}, config.megatron))):
            return diagnosis.EIGHT_BITS
        return None if config.model.dtype == "float32" else diagnosis.ROUNDED

    def draws(self, diagnoses: Sequence[Diagnosis], sides: Sequence[Side]) -> Draws | None:
        """How the engine drew; None where its weights are not the reference's, whose likelihoods say nothing then, and
        where rewards or lengths chose among the responses, whose tokens are not drawn from mu then."""
        axis = next((v.axis for v in diagnoses if v.side == "engine"), None)
        if axis not in ("healthy", "sampling transform", "precision") or self._is_selected:
            return None
        side = next(side for side in sides if side.name == "engine")
        scores = self._scores_of(side.version, every=False)
        plain, by_name = scores.at(side.positions)
        names = [name for name, _ in diagnosis.samplers(self._run, scores.vocab_size)]
        by_sampler = {name: by_name[name] for name in names}
        configured = side.log_probs if axis == "healthy" else plain
        return diagnosis.draws(self._batch, side, configured, by_sampler)

    @property
    def _is_selected(self) -> bool:
        """Long responses have several versions where updates interrupt them, and are left out."""
        is_interrupted = any(len(t.version_spans) > 1 for t in self._batch)
        return self._config.rollout.drop_zero_variance_groups or is_interrupted

    def _scores_of(self, version: int, *, every: bool) -> Scores:
        key = version, every
        if key not in self._scores:
            reference = self._weights.reference(version)
            is_recorded = bool(reference.gates) and any(
                "routed_experts" in t.columns for t in self._batch
            )
            plain = Alternative("", "", at_temperature(self._config.temperature))
            chosen = diagnosis.alternatives(self._run, reference, is_recorded=is_recorded)
            near = [version + d for d in NEAREST if version + d in self._weights.folders]
            if not every:
                chosen, near = [c for c in chosen if diagnosis.is_decisive(c)], []
            by_name = self._scores_by(reference, f"version {version}", [plain, *chosen])
            for other in near:
                try:
                    more, by_other = self._by_version(reference, other)
                except (OSError, ValueError, RuntimeError) as error:
                    # It is an alternative: the side is examined without it.
                    self._unexamined[f"weights of version {other}"] = str(error)
                    continue
                chosen += more
                by_name |= by_other
            self._scores[key] = Scores(reference.vocab_size, chosen, by_name.pop(""), by_name)
        return self._scores[key]

    def _by_version(
        self, reference: Reference, version: int
    ) -> tuple[list[Alternative], dict[str, list[Tensor]]]:
        """Alternatives with weights of another ``version``, and log p by each. Two models at a time are in memory:
        what is handed back holds none."""
        other = self._weights.reference(version)
        chosen = diagnosis.alternatives_of_version(self._run, reference, version, other)
        by_name = self._scores_by(reference, f"weights of version {version}", chosen)
        return [replace(c, change=diagnosis.unchanged) for c in chosen], by_name

    def _scores_by(
        self, reference: Reference, name: str, chosen: Sequence[Alternative]
    ) -> dict[str, list[Tensor]]:
        with progress(f"scoring by {name}", len({c.change for c in chosen})) as bar:
            return diagnosis.scores(reference, chosen, self._batch, bar.advance)

    def _without_layout(
        self, diagnosed: Diagnosis, side: Side, plain: Sequence[Tensor]
    ) -> Diagnosis:
        """The diagnosed, or ``layout`` where the trainer in one process agrees with the reference."""
        config = self._config
        if config.parallel.world_size == 1:
            return diagnosed
        folder = self._weights.folder(side.version)
        rung = Rung("layout", folder, config.temperature, config.router_replay, config.model.dtype)
        batch = [self._batch[i] for i in side.positions]
        try:
            with closing(trainer_of(config, batch, rung)) as trainer:
                alone = log_probs_of(trainer, config.training.micro_batch_tokens, rung, batch)
        except (OSError, ValueError, RuntimeError) as error:
            # A model that takes several processes need not fit into one.
            self._unexamined["layout"] = str(error)
            return diagnosed
        finally:
            # The rest of this process is no rank: what comes after may begin a group of its own.
            if dist.is_initialized():
                dist.destroy_process_group()
        gap = diagnosis.gap(alone.exp(), diagnosis.joined(plain).exp())
        if gap > diagnosed.bound:
            return diagnosed
        cause = Alternative("layout", LAYOUT, at_temperature(config.temperature))
        tokens = [replace(token, with_cause=None) for token in diagnosed.tokens]
        gaps = {LAYOUT: gap, **diagnosed.gaps}
        return replace(diagnosed, cause=cause, gaps=gaps, tokens=tokens)


def show(console: Console, doctor_report: DoctorReport) -> None:
    """Findings, then a table for each side."""
    for line in doctor_report.conclusions:
        console.print(line, style="bold")
    for table in tables(doctor_report):
        show_table(console, table)


def tables(doctor_report: DoctorReport) -> list[SummaryTable]:
    """Of each side what alternatives leave, and of one with a cause the tokens that show it."""
    summaries = []
    for diagnosed in doctor_report.diagnoses:
        title = (
            f"{diagnosed.side}, weights of version {diagnosed.version}: {diagnosed.axis}; mean |p - reference| "
            f"{diagnosed.gap:.1e}, noise up to {diagnosed.bound:.1e}"
        )
        rows = [(name, f"{gap:.1e}") for name, gap in list(diagnosed.gaps.items())[:SHOWN]]
        note = (
            "computed otherwise: what the reference does in another way; gap: mean |p - reference| that is left then. "
            f"{_judged_by(diagnosed)}"
        )
        summaries.append(SummaryTable(title, ("computed otherwise", "gap"), rows, note))
        if not diagnosed.is_healthy:
            summaries.append(_tokens(diagnosed, doctor_report.texts))
    return summaries


def _judged_by(diagnosed: Diagnosis) -> str:
    """How the gaps of a table lead to its verdict."""
    if diagnosed.is_healthy:
        return "The side is within the noise, so none is a cause."
    return f"The cause is what leaves least, and at most a quarter of {diagnosed.gap:.1e}."


def _tokens(diagnosed: Diagnosis, texts: TokenTexts) -> SummaryTable:
    columns = ("token", "response", "at", *diagnosed.columns, "with the cause")
    rows = [
        (
            repr(texts[t.token_id]), str(t.response), str(t.position), f"{t.side:.4f}",
            f"{t.reference:.4f}", "" if t.with_cause is None else f"{t.with_cause:.4f}",
        )
        for t in diagnosed.tokens[:TOKENS]
    ]  # fmt: skip
    side, reference = diagnosed.columns
    note = (
        "response: its number in the batch; at: the token's place in it; then the token's probability: "
        f"{side}, {reference}, and the reference's with the cause."
    )
    return SummaryTable("The tokens that differ most", columns, rows, note)


def page(title: str, facts: Sequence[str], doctor_report: DoctorReport) -> str:
    """The HTML page."""
    sides = [v for v in doctor_report.diagnoses if not v.is_healthy]
    below = [block for diagnosed in sides for block in _responses(diagnosed, doctor_report)]
    return tables_page(title, [*doctor_report.conclusions, *facts], tables(doctor_report), below)


def _responses(diagnosed: Diagnosis, doctor_report: DoctorReport) -> Iterator[str]:
    """The responses with the largest gaps, every token coloured by its gap."""
    yield f"<h2>{diagnosed.side}: the responses that differ most</h2>"
    yield (
        '<p class="legend"><span class="explained" style="--tv:.5">with the cause the reference says the same</span>'
        '<span class="left" style="--tv:.5">it says something else still</span></p><p class="about">The '
        "darker, the further from the reference. Point at a token for its numbers.</p>"
    )
    by_response: dict[int, list[TokenEvidence]] = {}
    for token in diagnosed.tokens:
        by_response.setdefault(token.response, []).append(token)
    largest = diagnosed.tokens[0].gap
    for index in list(by_response)[:RESPONSES]:
        t, tokens = doctor_report.batch[index], by_response[index]
        spans = [
            token_span(
                "explained" if token.is_explained else "left",
                doctor_report.texts[token.token_id],
                _numbers(diagnosed, token),
                token.gap / largest,
            )
            for token in sorted(tokens, key=lambda token: token.position)
        ]
        about = f"response {index}: problem {t.problem_id}, sample {t.sample_index}"
        yield response_block(about, doctor_report.texts.joined(t.prompt_ids.tolist()), spans)


def _numbers(diagnosed: Diagnosis, token: TokenEvidence) -> str:
    """A token's tooltip."""
    lines = [
        f"id {token.token_id}, token {token.position}",
        *(
            f"{name} {p:.6g}"
            for name, p in zip(diagnosed.columns, (token.side, token.reference), strict=True)
        ),
    ]
    if diagnosed.cause is not None and token.with_cause is not None:
        lines.append(f"{diagnosed.cause.name}: {token.with_cause:.6g}")
    return "\n".join(lines)


def as_json(doctor_report: DoctorReport) -> dict[str, Any]:
    """Every figure."""
    return {
        "findings": doctor_report.findings,
        "sides": [
            {
                "side": v.side, "version": v.version, "axis": v.axis,
                "cause": v.cause.name if v.cause else None, "gap": v.gap, "noise": v.noise, "bound": v.bound,
                "gaps": dict(v.gaps), "tokens": [asdict(t) for t in v.tokens[:TOKENS]],
            }
            for v in doctor_report.diagnoses
        ],
        "draws": asdict(doctor_report.draws) if doctor_report.draws else None,
        "prompt_faults": list(doctor_report.prompt_faults),
        "unexamined": dict(doctor_report.unexamined),
    }  # fmt: skip
