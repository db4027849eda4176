"""Examine the sides of a batch (class ``Doctor``), and show the result as text, tables, an HTML page and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import load_tokenizer
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor import (
    causes,
    diagnosis,
    engine_tensors,
    sampling_evidence,
    teachers,
)
from megatron_dppo.diagnostics.doctor.causes import Alternative, SampledRun, at_temperature
from megatron_dppo.diagnostics.doctor.diagnosis import Diagnosis, Reading, Side, TokenEvidence
from megatron_dppo.diagnostics.doctor.engine_tensors import RankTensors, TensorFault, tensor_faults
from megatron_dppo.diagnostics.doctor.ladder import (
    Rung,
    has_recorded_routing,
    log_probs_of,
    trainer_of,
)
from megatron_dppo.diagnostics.doctor.reference import KnownWeights, Reference
from megatron_dppo.diagnostics.doctor.sampling_evidence import Draws
from megatron_dppo.diagnostics.explain.explanation import TokenTexts
from megatron_dppo.diagnostics.pages import ResponseText, SummaryTable, TokenSpan, render_page
from megatron_dppo.loop.gap_guard import is_coarse
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.rollout_figures import generated_figures, rows_of
from megatron_dppo.loop.teachers import TeacherPrompts
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import ModelSpec
from megatron_dppo.weights.server.held_tensors import HeldTensors

TENSORS = 8
"""Number of findings about tensors that the report shows; --json has all."""
SHOWN, TOKENS, RESPONSES = 6, 12, 8
"""For each side, the report shows the SHOWN nearest alternatives and the TOKENS tokens with the largest gaps. The page
also shows the RESPONSES responses with the largest gaps."""
NEAR_OFFSETS = (-1, 1, -2, -4, -8)
"""Offsets from a side's version to the near versions. If the run has their weights, they are tried as stale or too new
weights."""
LAYOUT = "the same trainer in one process does not differ"
"""Name of the alternative whose cause is the parallel layout."""


@dataclass(frozen=True)
class DoctorReport:
    """The result for a batch.

    Attributes:
        batch: the trajectories that were examined.
        diagnoses: one diagnosis for each side that was examined.
        draws: how the engine sampled the tokens; None if the sampling was not examined.
        prompt_faults: one line for each prompt that differs.
        tensor_faults: one fault for each tensor of a server that differs from the weights of the server's version.
        texts: texts of token ids.
        facts: lines about the batch.
        unexamined: the reason why something was not examined, by its name (a side, ``prompts``, ...).
    """

    batch: Sequence[Trajectory]
    diagnoses: Sequence[Diagnosis]
    draws: Draws | None
    prompt_faults: Sequence[str]
    tensor_faults: Sequence[TensorFault]
    texts: TokenTexts
    facts: Sequence[str]
    unexamined: Mapping[str, str]

    @property
    def conclusions(self) -> list[str]:
        """Return ``findings``; without findings, a line that says which sides agree with the reference."""
        examined = [side_diagnosis.side for side_diagnosis in self.diagnoses]
        if self.findings:
            return self.findings
        if not examined:
            return ["neither side was examined: nothing is known of them"]
        if not {"engine", "trainer"} & self.unexamined.keys():
            return ["nothing is wrong: both sides agree with the reference"]
        missing_sides = " and ".join(
            side for side in self.unexamined if side in ("engine", "trainer")
        )
        return [f"{' and '.join(examined)}: nothing is wrong; the {missing_sides} was not examined"]

    @property
    def all_facts(self) -> list[str]:
        """Return ``facts``, and a line for each entry of ``unexamined``."""
        reasons = [f"{name} not examined: {reason}" for name, reason in self.unexamined.items()]
        return [*self.facts, *reasons]

    @property
    def findings(self) -> list[str]:
        """Return one line for each fault that was found."""
        lines = findings_of(self.diagnoses, self.draws)
        tensor_lines = engine_tensors.findings_of(self.tensor_faults)
        lines += tensor_lines[:TENSORS]
        if len(tensor_lines) > TENSORS:
            hidden_count = len(tensor_lines) - TENSORS
            lines.append(f"engine: {hidden_count} more findings about tensors (--json)")
        if self.prompt_faults:
            lines.append(
                f"tokenizer: {len(self.prompt_faults)} prompts differ; {self.prompt_faults[0]}"
            )
        return lines


def findings_of(diagnoses: Sequence[Diagnosis], draws: Draws | None) -> list[str]:
    """Return one line for each side that differs, and one for copied responses or for another sampler."""
    lines = [
        _sentence(side_diagnosis) for side_diagnosis in diagnoses if not side_diagnosis.is_healthy
    ]
    if draws is not None and draws.has_copies:
        first_copy, second_copy = draws.copies[0]
        lines.append(
            f"seeds: {len(draws.copies)} pairs of equal responses in groups, "
            f"{draws.expected_copies:.2g} expected; responses {first_copy} and {second_copy} are equal"
        )
    elif draws is not None and draws.sampler is not None:
        lines.append(
            f"sampling: the {draws.tokens} tokens were drawn as by {draws.sampler} "
            f"(log likelihood ratio {draws.evidence:.0f})"
        )
    return lines


def _sentence(side_diagnosis: Diagnosis) -> str:
    """Return the line about a side that differs."""
    if side_diagnosis.cause is None:
        return (
            f"{side_diagnosis.side}: unexplained, mean |p - reference| {side_diagnosis.gap:.1e} at version "
            f"{side_diagnosis.version}; no alternative comes near"
        )
    remaining_gap = side_diagnosis.gaps[side_diagnosis.cause.name]
    return (
        f"{side_diagnosis.side}: {side_diagnosis.axis}: {side_diagnosis.cause.name} (mean |p - reference| "
        f"{side_diagnosis.gap:.1e}, {remaining_gap:.1e} left of it)"
    )


@dataclass(frozen=True)
class Scores:
    """log p of the batch's tokens for one weight version: ``plain`` by the reference, ``by_name`` by alternatives."""

    vocab_size: int
    alternatives: Sequence[Alternative]
    plain: Sequence[Tensor]
    by_name: Mapping[str, Sequence[Tensor]]

    def at(self, positions: Sequence[int]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return ``plain`` and ``by_name`` of the trajectories at ``positions``."""
        by_name: dict[str, list[Tensor]] = {}
        for name, log_probs in self.by_name.items():
            by_name[name] = [log_probs[i] for i in positions]
        return [self.plain[i] for i in positions], by_name


class Doctor:
    """Examine a batch with the known weights of its run. Each reference model is loaded when it is first needed.

    ``reading``: what the sides have of each token.
    """

    def __init__(
        self,
        config: TrainConfig,
        batch: Sequence[Trajectory],
        weights: KnownWeights,
        reading: Reading = diagnosis.of_sampled,
    ) -> None:
        self._config = config
        self._batch = batch
        self._run = SampledRun(
            config.temperature,
            config.parallel.tensor,
            config.parallel.expert,
            quantized=config.engine.quantization is not None,
        )
        self._weights = weights
        self._reading = reading
        self._dtype = getattr(torch, config.model.dtype)
        self._sampling = at_temperature(config.temperature)
        self._scores: dict[tuple[int, bool], Scores] = {}
        self._unexamined: dict[str, str] = {}

    def report(self, step: int, servers: Sequence[HeldTensors] = ()) -> DoctorReport:
        """Compare both sides of the batch of ``step`` with the reference, and the prompts with the run's data.

        ``servers``: the tensors that the servers held. They are compared with the weights of the server's version.
        """
        config = self._config
        diagnoses, draws = self.diagnose(step)
        facts: list[str] = []
        faults: list[TensorFault] = []
        for server in servers:
            try:
                found = self._tensor_faults(server)
            except (OSError, ValueError, RuntimeError) as error:
                self._unexamined[f"tensors of {server.url}"] = str(error)
                continue
            faults += found
            if not found:
                facts.append(f"{server.url} held the tensors of version {server.version}")
        prompt_faults: list[str] = []
        try:
            data = RunData(config)
            origin = data.origin()
        except (DataError, OSError) as error:
            self._unexamined["prompts"] = str(error)
            if config.distillation.teachers:
                self._unexamined["teachers"] = str(error)
        else:
            prompt_faults = sampling_evidence.prompt_faults(self._batch, origin)
            if origin.makes_prompts:
                self._unexamined["prompts"] = "the environment makes them"
            if config.distillation.teachers:
                diagnoses += self._diagnose_teachers(data, facts)
        return DoctorReport(
            batch=self._batch,
            diagnoses=diagnoses,
            draws=draws,
            prompt_faults=prompt_faults,
            tensor_faults=faults,
            texts=TokenTexts(load_tokenizer(config.model.hf_checkpoint)),
            facts=[
                f"{config.model.dtype}, temperature {config.temperature:g}",
                *self._concentration(),
                *facts,
            ],
            unexamined=dict(self._unexamined),
        )

    def _tensor_faults(self, server: HeldTensors) -> list[TensorFault]:
        """Compare the tensors that ``server`` held with the tensors of its version. Raises OSError and ValueError."""
        if not server.version.isdecimal():
            raise ValueError(f"its weight version is {server.version!r}, expected a number")
        version = int(server.version)
        folder = self._weights.folder(version)
        shape = ModelSpec.read(self._config).shape
        faults: list[TensorFault] = []
        for rank in range(len(server.ranks)):
            own = RankTensors(server, rank, folder, shape, self._dtype)
            faults += tensor_faults(
                server, rank, own, partial(self._near_tensors, server, rank, shape)
            )
        return faults

    def _near_tensors(
        self, server: HeldTensors, rank: int, shape: ModelShape
    ) -> dict[int, RankTensors]:
        """Return the tensors that a rank of ``server`` would hold with the weights of a near version, by version.

        Near versions whose weights are not known are left out.
        """
        others: dict[int, RankTensors] = {}
        for offset in NEAR_OFFSETS:
            version = int(server.version) + offset
            if version in self._weights.folders:
                folder = self._weights.folder(version)
                others[version] = RankTensors(server, rank, folder, shape, self._dtype)
        return others

    def _diagnose_teachers(self, data: RunData, facts: list[str]) -> list[Diagnosis]:
        """Compare the teachers' scores of the batch, saved and by servers that answer now, with their checkpoints.

        Warnings about the teachers' prompts are added to ``facts``.
        """
        try:
            prompts = TeacherPrompts(self._config, data)
            problems = data.train.problems
            cases = teachers.teacher_cases(self._config, prompts, problems, self._batch)
        except (DataError, ModelError, OSError) as error:
            self._unexamined["teachers"] = str(error)
            return []
        facts += prompts.warnings
        diagnoses: list[Diagnosis] = []
        for case in cases:
            known_weights = KnownWeights({0: case.folder}, case.folder, case.folder)
            doctor = Doctor(case.config, case.batch, known_weights)
            try:
                found = [doctor.examine(side) for side in case.sides(self._unexamined)]
                if topk_side := case.topk_side():
                    topk_doctor = Doctor(
                        case.config, case.batch, known_weights, teachers.reference_topk_mass
                    )
                    found.append(topk_doctor.examine(topk_side))
            except (OSError, ValueError, RuntimeError) as error:
                self._unexamined[case.name] = str(error)
                continue
            for teacher in found:
                tokens = [replace(t, response=case.positions[t.response]) for t in teacher.tokens]
                diagnoses.append(replace(teacher, tokens=tokens))
        return diagnoses

    def _concentration(self) -> list[str]:
        """Return a line about how similar the responses of a group are; no line if the batch lacks TopK(mu)."""
        rows = rows_of(self._batch, self._config.rollout.group_size)
        value = generated_figures(rows).get(metric_names.CONCENTRATION)
        if value is None:
            return []
        normal = metric_names.METRICS[metric_names.CONCENTRATION].normal
        assert normal is not None
        verdict = "normal"
        if value > normal.high:
            verdict = f"above {normal.high:g}: {normal.why}"
        return [f"{normal.label} {value:.3f}: {verdict}"]

    def diagnose(self, step: int) -> tuple[list[Diagnosis], Draws | None]:
        """Diagnose each side that can be examined, and how the engine sampled the tokens."""
        examined = self._sides(step)
        if self._is_selected:
            self._unexamined["draws"] = "rewards or lengths chose among the responses"
        diagnoses = [self.examine(side) for side in examined]
        draws = self.draws(diagnoses, examined)
        if any(d.side == "engine" and d.is_healthy for d in diagnoses):
            # ``_sides`` returns the engine first.
            diagnoses += self._diagnose_recording(examined[0])
        return diagnoses, draws

    def _sides(self, step: int) -> list[Side]:
        """Return the sides that can be examined. For any other side, the reason goes into ``_unexamined``."""
        config = self._config
        mini_batch = config.mini_batch_responses
        engine = diagnosis.engine_side(self._batch)
        trainer = None
        if engine is None:
            self._unexamined["engine"] = (
                "no response of the batch was sampled by a single weight version"
            )
        if config.lora.dropout:
            self._unexamined["trainer"] = "its pass has dropout (lora.dropout)"
        else:
            trainer = diagnosis.trainer_side(self._batch, step, mini_batch)
            if trainer is None:
                reason = "no response of the first mini-batch has its log-probabilities"
                self._unexamined["trainer"] = reason
        sides = [side for side in (engine, trainer) if side is not None]
        sides_with_weights: list[Side] = []
        for side in sides:
            if side.version in self._weights.folders:
                sides_with_weights.append(side)
            else:
                self._unexamined[side.name] = self._weights.unknown_text(side.version)
        return sides_with_weights

    def examine(self, side: Side) -> Diagnosis:
        """Diagnose ``side``: first with the few alternatives that decide whether it is healthy, then with all of them.

        Raises OSError or ValueError if weights cannot be read.
        """
        for with_all in (False, True):
            plain, by_name, alternatives = self._side_scores(side, every=with_all)
            rounding = self._rounding(side.name)
            side_diagnosis = diagnosis.judge(
                side, self._batch, plain, by_name, alternatives, rounding
            )
            if side_diagnosis.is_healthy:
                break
        if side.name == "trainer" and side_diagnosis.may_be_layout:
            return self._test_layout(side_diagnosis, side, plain)
        return side_diagnosis

    def _side_scores(
        self, side: Side, *, every: bool
    ) -> tuple[list[Tensor], dict[str, list[Tensor]], list[Alternative]]:
        """Return the log p that a side should have, log p by each alternative's name, and the alternatives.

        ``every``: as in ``_version_scores``.
        """
        scores = self._version_scores(side.version, every=every)
        plain, by_name = scores.at(side.positions)
        alternatives = list(scores.alternatives)
        for name, shift in causes.SHIFTS:
            by_name[name] = [log_p.roll(shift) for log_p in plain]
            alternatives.append(Alternative("tokens", name, self._sampling))
        if side.name == "trainer" and self._config.router_replay and causes.RECORDED in by_name:
            # The trainer must use the experts that the engine recorded, even if the engine chose wrong experts.
            alternatives.append(Alternative("routing", causes.NATURAL, self._sampling))
            plain, by_name = diagnosis.with_recorded_experts(plain, by_name)
            # The recorded experts are the reference now, so they are no alternative.
            alternatives = [c for c in alternatives if c.name in by_name]
        return plain, by_name, alternatives

    def _diagnose_recording(self, engine: Side) -> list[Diagnosis]:
        """Diagnose whether a healthy engine recorded the experts that it used.

        The trainer and its reference use the recorded experts; the engine and its reference do not. So neither side
        shows wrong recordings, and a third side is needed. Returns an empty list if the run replays no routing.
        """
        scores = self._version_scores(engine.version, every=False)
        natural, by_name = scores.at(engine.positions)
        if not self._config.router_replay or causes.RECORDED not in by_name:
            return []
        recorded, by_name = diagnosis.with_recorded_experts(natural, by_name)
        by_alternative = {name: by_name[name] for name in causes.ROUNDINGS if name in by_name}
        alternatives = [c for c in scores.alternatives if c.name == causes.ROUNDED]
        # The side has log p with the router's own choice, ``recorded`` has log p with the recorded experts.
        side = replace(engine, name=causes.RECORDING, log_probs=tuple(natural))
        rounding = self._rounding("engine")
        side_diagnosis = diagnosis.judge(
            side, self._batch, recorded, by_alternative, alternatives, rounding
        )
        if not side_diagnosis.is_healthy:
            reference = self._weights.reference(engine.version)
            candidates = causes.alternatives(self._run, reference, is_recorded=True)
            shifts = [c for c in candidates if c.name in causes.MOVED_RECORDINGS]
            for name, values in self._score(reference, "moved recordings", shifts).items():
                by_alternative[name] = [values[i] for i in engine.positions]
            alternatives += shifts
            side_diagnosis = diagnosis.judge(
                side, self._batch, recorded, by_alternative, alternatives, rounding
            )
        return [side_diagnosis]

    def _rounding(self, side: str) -> str | None:
        """Return the name of the alternative that rounds as a healthy side may; None if ``side`` is in float32."""
        config = self._config
        if side != "trainer":
            if config.engine.quantization is not None:
                return causes.BLOCK_FP8
            is_coarse_side = is_coarse(config.sglang, {})
        else:
            is_coarse_side = is_coarse({}, config.megatron)
        if is_coarse_side:
            return causes.EIGHT_BITS
        if config.model.dtype == "float32":
            return None
        return causes.ROUNDED

    def draws(self, diagnoses: Sequence[Diagnosis], sides: Sequence[Side]) -> Draws | None:
        """Test how the engine sampled its tokens.

        Returns None in two cases. If the engine's weights are not the reference's, the reference's likelihoods say
        nothing about the sampler. If rewards or lengths selected the responses, their tokens are not a sample from mu.
        """
        axis = next((d.axis for d in diagnoses if d.side == "engine"), None)
        if axis not in ("healthy", "sampling transform", "precision") or self._is_selected:
            return None
        side = next(side for side in sides if side.name == "engine")
        scores = self._version_scores(side.version, every=False)
        plain, by_name = scores.at(side.positions)
        sampler_names = [name for name, _ in causes.samplers(self._run, scores.vocab_size)]
        by_sampler = {name: by_name[name] for name in sampler_names}
        configured = side.log_probs if axis == "healthy" else plain
        return sampling_evidence.draws(self._batch, side, configured, by_sampler)

    @property
    def _is_selected(self) -> bool:
        """Whether rewards or lengths selected the responses of the engine's side.

        If weight updates interrupt responses, the long responses have several versions. The engine's side lacks these
        responses, so the responses that it has were selected by length.
        """
        is_interrupted = any(len(t.version_spans) > 1 for t in self._batch)
        return self._config.rollout.drop_zero_variance_groups or is_interrupted

    def _version_scores(self, version: int, *, every: bool) -> Scores:
        """Score the batch by the weights of ``version``, or return the scores of an earlier call.

        If ``every`` is true, score all alternatives, including the weights of near versions. If not, score only the
        decisive alternatives (``causes.is_decisive``).
        """
        key = version, every
        if key not in self._scores:
            reference = self._weights.reference(version)
            is_recorded = bool(reference.gates) and has_recorded_routing(self._batch)
            plain = Alternative("", "", self._sampling)
            alternatives = causes.alternatives(self._run, reference, is_recorded=is_recorded)
            near_versions = [version + offset for offset in NEAR_OFFSETS]
            near_versions = [v for v in near_versions if v in self._weights.folders]
            if not every:
                alternatives = [c for c in alternatives if causes.is_decisive(c)]
                near_versions = []
            by_name = self._score(reference, f"version {version}", [plain, *alternatives])
            for other_version in near_versions:
                try:
                    new_alternatives, by_alternative = self._other_version_scores(
                        reference, other_version
                    )
                except (OSError, ValueError, RuntimeError) as error:
                    # The other weights only add alternatives: the side is examined without them.
                    self._unexamined[f"weights of version {other_version}"] = str(error)
                    continue
                alternatives += new_alternatives
                by_name |= by_alternative
            self._scores[key] = Scores(reference.vocab_size, alternatives, by_name.pop(""), by_name)
        return self._scores[key]

    def _other_version_scores(
        self, reference: Reference, version: int
    ) -> tuple[list[Alternative], dict[str, list[Tensor]]]:
        """Return the alternatives with weights of another ``version``, and log p by each.

        Two models are in memory during the call. The returned alternatives keep no reference to either.
        """
        other = self._weights.reference(version)
        alternatives = causes.alternatives_of_version(self._run, reference, version, other)
        by_name = self._score(reference, f"weights of version {version}", alternatives)
        return [replace(c, change=causes.unchanged) for c in alternatives], by_name

    def _score(
        self, reference: Reference, name: str, some_alternatives: Sequence[Alternative]
    ) -> dict[str, list[Tensor]]:
        """Compute log p of the batch by each alternative; the progress bar shows ``name``."""
        with progress(f"scoring by {name}", len({c.change for c in some_alternatives})) as bar:
            return diagnosis.scores(
                reference, some_alternatives, self._batch, bar.advance, self._reading
            )

    def _test_layout(
        self, side_diagnosis: Diagnosis, side: Side, plain: Sequence[Tensor]
    ) -> Diagnosis:
        """Return ``side_diagnosis`` with the cause ``layout`` if the trainer in one process agrees with the reference.

        If the trainer in one process does not agree, or cannot run, return ``side_diagnosis`` unchanged.
        """
        config = self._config
        if config.parallel.world_size == 1:
            return side_diagnosis
        folder = self._weights.folder(side.version)
        rung = Rung("layout", folder, config.temperature, config.router_replay, config.model.dtype)
        batch = [self._batch[i] for i in side.positions]
        try:
            with closing(trainer_of(config, batch, rung)) as trainer:
                log_pi = log_probs_of(trainer, config.training.micro_batch_tokens, rung, batch)
        except (OSError, ValueError, RuntimeError) as error:
            # A model that is trained by several processes may not fit into one.
            self._unexamined["layout"] = str(error)
            return side_diagnosis
        finally:
            # Destroy the trainer's process group: later code in this process may create a default group again, and
            # torch rejects a second default group.
            if dist.is_initialized():
                dist.destroy_process_group()
        gap = diagnosis.gap(log_pi.exp(), diagnosis.joined(plain).exp())
        if gap > side_diagnosis.bound:
            return side_diagnosis
        cause = Alternative("layout", LAYOUT, self._sampling)
        tokens = [replace(token, with_cause=None) for token in side_diagnosis.tokens]
        gaps = {LAYOUT: gap, **side_diagnosis.gaps}
        return replace(side_diagnosis, cause=cause, gaps=gaps, tokens=tokens)


def show(console: Console, doctor_report: DoctorReport) -> None:
    """Print the conclusions, then the tables."""
    for line in doctor_report.conclusions:
        console.print(line, style="bold")
    for table in tables(doctor_report):
        table.show(console)


def tables(doctor_report: DoctorReport) -> list[SummaryTable]:
    """Return a table of alternatives for each side, and a table of tokens for each side that differs."""
    summaries = []
    for side_diagnosis in doctor_report.diagnoses:
        title = (
            f"{side_diagnosis.side}, weights of version {side_diagnosis.version}: {side_diagnosis.axis}; "
            f"mean |p - reference| {side_diagnosis.gap:.1e}, noise up to {side_diagnosis.bound:.1e}"
        )
        rows = [(name, f"{gap:.1e}") for name, gap in list(side_diagnosis.gaps.items())[:SHOWN]]
        note = (
            "computed otherwise: what the reference does in another way; gap: mean |p - reference| that is left then. "
            f"{_judged_by(side_diagnosis)}"
        )
        summaries.append(SummaryTable(title, ("computed otherwise", "gap"), rows, note))
        if not side_diagnosis.is_healthy:
            summaries.append(_tokens(side_diagnosis, doctor_report.texts))
    return summaries


def _judged_by(side_diagnosis: Diagnosis) -> str:
    """Return the sentence that explains the verdict from the gaps of a table."""
    if side_diagnosis.is_healthy:
        return "The side is within the noise, so none is a cause."
    return f"The cause is the row with the smallest gap, if this gap is at most a quarter of {side_diagnosis.gap:.1e}."


def _tokens(side_diagnosis: Diagnosis, texts: TokenTexts) -> SummaryTable:
    """Return the table of the tokens with the largest gaps."""
    columns = ("token", "response", "at", *side_diagnosis.columns, "with the cause")
    rows: list[tuple[str, ...]] = []
    for token in side_diagnosis.tokens[:TOKENS]:
        text = repr(texts[token.token_id])
        with_cause = ""
        if token.with_cause is not None:
            with_cause = f"{token.with_cause:.4f}"
        probabilities = (f"{token.side:.4f}", f"{token.reference:.4f}", with_cause)
        rows.append((text, str(token.response), str(token.position), *probabilities))
    side, reference = side_diagnosis.columns
    note = (
        "response: its number in the batch; at: the token's place in it; then the token's probability: "
        f"{side}, {reference}, and the reference's with the cause."
    )
    return SummaryTable("The tokens that differ most", columns, rows, note)


def page(title: str, facts: Sequence[str], doctor_report: DoctorReport) -> str:
    """Return the HTML page."""
    return render_page(
        "doctor.html",
        title=title,
        facts=[*doctor_report.conclusions, *facts],
        tables=tables(doctor_report),
        sides=[
            (side_diagnosis.side, _responses(side_diagnosis, doctor_report))
            for side_diagnosis in doctor_report.diagnoses
            if not side_diagnosis.is_healthy
        ],
    )


def _responses(side_diagnosis: Diagnosis, doctor_report: DoctorReport) -> list[ResponseText]:
    """Return the responses with the largest gaps; the colour of a token shows its gap."""
    by_response: dict[int, list[TokenEvidence]] = {}
    for token in side_diagnosis.tokens:
        by_response.setdefault(token.response, []).append(token)
    largest_gap = side_diagnosis.tokens[0].gap
    responses = []
    for index in list(by_response)[:RESPONSES]:
        t = doctor_report.batch[index]
        tokens = by_response[index]
        spans = [
            TokenSpan(
                "explained" if token.is_explained else "left",
                doctor_report.texts[token.token_id],
                _numbers(side_diagnosis, token),
                token.gap / largest_gap,
            )
            for token in sorted(tokens, key=lambda token: token.position)
        ]
        about = f"response {index}: problem {t.problem_id}, sample {t.sample_index}"
        prompt = doctor_report.texts.joined(t.prompt_ids.tolist())
        responses.append(ResponseText(about, prompt, spans))
    return responses


def _numbers(side_diagnosis: Diagnosis, token: TokenEvidence) -> str:
    """Return the tooltip of a token."""
    side, reference = side_diagnosis.columns
    lines = [
        f"id {token.token_id}, token {token.position}",
        f"{side} {token.side:.6g}",
        f"{reference} {token.reference:.6g}",
    ]
    if side_diagnosis.cause is not None and token.with_cause is not None:
        lines.append(f"{side_diagnosis.cause.name}: {token.with_cause:.6g}")
    return "\n".join(lines)


def as_json(doctor_report: DoctorReport) -> dict[str, Any]:
    """Return every figure of the report as JSON values."""
    return {
        "findings": doctor_report.findings,
        "sides": [_side_as_json(side_diagnosis) for side_diagnosis in doctor_report.diagnoses],
        "draws": asdict(doctor_report.draws) if doctor_report.draws else None,
        "prompt_faults": list(doctor_report.prompt_faults),
        "tensor_faults": [asdict(fault) for fault in doctor_report.tensor_faults],
        "unexamined": dict(doctor_report.unexamined),
    }


def _side_as_json(side_diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "side": side_diagnosis.side,
        "version": side_diagnosis.version,
        "axis": side_diagnosis.axis,
        "cause": side_diagnosis.cause.name if side_diagnosis.cause else None,
        "gap": side_diagnosis.gap,
        "noise": side_diagnosis.noise,
        "bound": side_diagnosis.bound,
        "gaps": dict(side_diagnosis.gaps),
        "tokens": [asdict(token) for token in side_diagnosis.tokens[:TOKENS]],
    }
