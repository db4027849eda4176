"""Run a recipe on this machine's CPUs with a tiny model: its layout, algorithm, data, reward and environment.

``megatron-dppo rehearse RECIPE.yaml [key.path=value ...]`` needs no GPU and no weights. It makes a random model of the
recipe's family, selects a few rows of the recipe's data, starts all ranks of the layout as processes, trains, stops,
resumes, evaluates, exports, and ends with a verdict. Exit codes: 0 passed, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_dppo.cluster.known_models import KnownModel, read_model, read_or_guess_model
from megatron_dppo.cluster.planner.devices import gib
from megatron_dppo.cluster.planner.recipes import is_supervised
from megatron_dppo.cluster.rehearsal import (
    RESULT,
    attempts,
    shrinking,
    supervised,
    tiny_model,
    tiny_sizes,
    verdict,
)
from megatron_dppo.cluster.rehearsal.findings import findings
from megatron_dppo.cluster.rehearsal.layout import smaller_layout
from megatron_dppo.cluster.rehearsal.problems import Problems, make_problems, metadata_of_toys
from megatron_dppo.cluster.rehearsal.shrinking import Omission, RehearsalInputs
from megatron_dppo.cluster.rehearsal.tokenizer import write_tokenizer
from megatron_dppo.cluster.rehearsal.usage import MIB, UsageByPhase, UsageSample
from megatron_dppo.cluster.rehearsal.weights import write_model
from megatron_dppo.config import (
    ConfigError,
    SupervisedConfig,
    TrainConfig,
    check_config,
    check_supervised_config,
    forwarded,
    load_as,
    load_config,
    resolved_yaml,
)
from megatron_dppo.config.machine import this_machine
from megatron_dppo.config.schema import ParallelConfig, PolicyConfig, TeacherConfig
from megatron_dppo.data.problems import ProblemSet, load_tokenizer
from megatron_dppo.data.tokenizer import has_tokenizer
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.server_arguments import table_faults_elsewhere
from megatron_dppo.environments.over_http import absent_services
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, place
from megatron_dppo.logging import INTERRUPTED, REFUSED
from megatron_dppo.metrics.records import SUMMARY_FILE, last_step, read_records
from megatron_dppo.metrics.summary import describe_layout
from megatron_dppo.metrics.verdict import VerdictRow
from megatron_dppo.model.engine_layout import server_ranks
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.layout import Layout
from megatron_dppo.rewards.trial import reward_faults
from megatron_dppo.spec import Roles
from megatron_dppo.system.arguments import positive_count, whole_number
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import folder_fault, rename_with_time
from megatron_dppo.system.secret_variables import hide_secrets
from megatron_dppo.system.text import short_json

_LOG_WIDTH = 120
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else _LOG_WIDTH)
FAILED = 1
STOP_AFTER = 1
"""Step after which the first run is stopped."""
CONFIG = "rehearsal.yaml"
PREPARED = "prepared.json"
"""File that passes the rehearsal's omissions from the process that prepares a rehearsal to the process that runs it."""
IMPORTS_LOG = "imports.log"
"""File with the output of the fork servers that import the libraries."""
_GPUS_OF_A_NODE = 8
_PREPARATIONS = 4
"""Number of phases before the first process starts."""
_IMPORT_AND_RUNS = 3
"""Number of phases after the preparations: the import of the libraries, and two runs."""
_SUPERVISED_PREPARATIONS = 3
_SUPERVISED_RUNS = 2
# Rough memory and processor seconds of processes, for the estimate before a start.
_SERVER_MIB = 1600
_RANK_MIB = 300
_STARTS_CPU_S = 60
_RANK_CPU_S = 12


@dataclass
class RehearsalPhases:
    """The phases of a rehearsal.

    Attributes:
        count: number of phases of the whole rehearsal.
        seconds: seconds of each phase that has ended, in order.
        current: name of the phase that began last.
    """

    count: int
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and measure it."""
        self.current = name
        say(f"phase {len(self.seconds) + 1} of {self.count}: {name}")
        start_time = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start_time


def say(line: str) -> None:
    """Print a line of progress."""
    CONSOLE.print(f"[rehearse] {line}", soft_wrap=True, markup=False)


def prepared_rehearsal(arguments: Sequence[str], form: attempts.RunForm) -> Rehearsal:
    """Return the rehearsal that another process prepared with the same arguments; ``form`` starts its runs."""
    options = _parser().parse_intermixed_args(arguments)
    # The two runs are the only phases of this process.
    return Rehearsal(options, RehearsalPhases(2), form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse a recipe and return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    hide_secrets()
    ends_early = options.dry_run or options.on_nodes is not None
    phases = RehearsalPhases(_PREPARATIONS if ends_early else _PREPARATIONS + _IMPORT_AND_RUNS)
    try:
        if is_supervised(Path(options.recipe)):
            phases.count = _SUPERVISED_PREPARATIONS + (0 if ends_early else _SUPERVISED_RUNS)
            return Rehearsal(options, phases).run_supervised()
        return Rehearsal(options, phases).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (RunError, ConfigError, ModelError) as error:
        _fail(phases.current, str(error))
        return REFUSED


@dataclass(frozen=True)
class RecipeInputs:
    """The recipe's model, layout and placement, as the rehearsal uses them.

    Attributes:
        known_model: the recipe's model, or a known model in its place.
        parallel: the layout to rehearse: the recipe's own layout, or a smaller one (``--ranks``).
        placement: the recipe's ranks and servers on the nodes of the options; None without ``--nodes``.
    """

    known_model: KnownModel
    parallel: ParallelConfig
    placement: Placement | None


class Rehearsal:
    """One rehearsal of a recipe, from its files to the verdict.

    Raises ConfigError, ModelError and other RunErrors for faults of the recipe, before a process is started.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        phases: RehearsalPhases,
        form: attempts.RunForm = attempts.LOCAL,
    ) -> None:
        self.options = options
        self.phases = phases
        self.form = form
        self.recipe = Path(options.recipe)
        self.directory = Path(options.directory or Path("runs") / f"rehearsal-{self.recipe.stem}")
        self.run_directory = self.directory / "run"
        self.model = self.directory / "model"
        self.config_path = self.directory / CONFIG
        self.usage = UsageByPhase()
        self.imports_cpu_seconds = 0.0

    def run(self) -> int:
        """Run all phases."""
        with self.phases.phase("read the recipe"):
            config = load_config(self.recipe, self.options.overrides)
            inputs_of_recipe = self._recipe_inputs(config)
        known_model = inputs_of_recipe.known_model
        parallel = inputs_of_recipe.parallel
        with self.phases.phase("make the tokenizer and the problems"):
            tokenizer_source = self._write_tokenizer(config)
            problems = self._problems(config, parallel)
            self._print_sources(config, known_model, tokenizer_source, problems)
        with self.phases.phase("check the recipe's values"):
            self._check_recipe(config, known_model, tokenizer_source, problems)
            say(f"  {self._outline(config, parallel)}")
        inputs = self._inputs(config, problems, tokenizer_source)
        with self.phases.phase("make a tiny model and the rehearsal's configuration"):
            longest = shrinking.longest_sequence(config.environment, inputs.longest_prompt)
            self._make_model(config, inputs_of_recipe, inputs, longest)
            rehearsal_config = shrinking.shrink(config, parallel, inputs)
            path = self.config_path
            changes = shrinking.changed_values(config, rehearsal_config)
            text = _commented(changes) + resolved_yaml(rehearsal_config)
            path.write_text(text, encoding="utf-8")
            say(
                f"  {path}: {len(changes)} keys differ from the recipe's; its first lines list them"
            )
            self._print_estimate(rehearsal_config)
        if self.options.dry_run:
            say(f"nothing was started; megatron-dppo train {path} is the rehearsal's run")
            return 0
        omissions = _absent_parts(known_model, problems)
        omissions += shrinking.omissions(config, parallel, inputs)
        if self.options.on_nodes is not None:
            entries = [asdict(omission) for omission in omissions]
            (self.directory / PREPARED).write_text(json.dumps(entries), encoding="utf-8")
            return 0
        with self.phases.phase("import the libraries of ranks and servers"):
            fork_servers = attempts.share_imports(rehearsal_config, self.directory / IMPORTS_LOG)
        self.form = self.form.with_imports(fork_servers)
        self.imports_cpu_seconds = fork_servers.cpu_seconds()
        try:
            return self._train(rehearsal_config, omissions, inputs_of_recipe.placement)
        finally:
            fork_servers.close()

    def run_supervised(self) -> int:
        """Run all phases of a supervised recipe. Raises DataError, too."""
        if self.options.on_nodes is not None:
            fault = "a supervised recipe is rehearsed on this machine only"
            raise ConfigError([fault], str(self.recipe))
        self.form = supervised.FORM
        with self.phases.phase("read the recipe"):
            config = load_as(SupervisedConfig, self.recipe, self.options.overrides)
            inputs_of_recipe = self._recipe_inputs(config)
        parallel = inputs_of_recipe.parallel
        with self.phases.phase("make the tokenizer and the data"):
            tokenizer_source = self._write_tokenizer(config)
            tokenizer = load_tokenizer(self.model)
            turns = supervised.make_turns(config.data, tokenizer, self.directory / "problems")
            self._refuse_absent(turns)
        with self.phases.phase("make a tiny model and the rehearsal's configuration"):
            inputs = self._files(turns, tokenizer_source)
            self._make_model(config, inputs_of_recipe, inputs, turns.longest)
            rehearsal_config = supervised.shrink(config, parallel, inputs)
            check_supervised_config(rehearsal_config, str(self.recipe))
            self.config_path.write_text(resolved_yaml(rehearsal_config), encoding="utf-8")
        if self.options.dry_run:
            command = f"megatron-dppo supervised {self.config_path}"
            say(f"nothing was started; {command} is the rehearsal's run")
            return 0
        runs = self.run_planned(supervised.PLANNED_RUNS, supervised.STEPS)
        omissions = shrinking.trainer_omissions(config, parallel, inputs)
        return self._conclude(
            runs,
            rehearsal_config,
            supervised.EXERCISED,
            [*_absent_parts(inputs_of_recipe.known_model, turns), *omissions],
            inputs_of_recipe.placement,
            lambda: supervised.findings(rehearsal_config),
        )

    def run_prepared(self) -> int:
        """Run and judge a rehearsal that another process has prepared in the folder (``--on-nodes``)."""
        entries = json.loads((self.directory / PREPARED).read_bytes())
        omissions = [Omission(**entry) for entry in entries]
        return self._train(load_config(self.config_path), omissions, None)

    def _recipe_inputs(self, config: PolicyConfig) -> RecipeInputs:
        """Find the recipe's model, layout and placement, and make an empty folder for the rehearsal."""
        known_model = self._known_model(config)
        parallel = config.parallel
        if self.options.ranks is not None:
            parallel = smaller_layout(parallel, self.options.ranks)
        self._set_aside()
        return RecipeInputs(known_model, parallel, self._placement(config))

    def _known_model(self, config: PolicyConfig) -> KnownModel:
        is_moe = config.parallel.expert > 1 or config.router_replay
        known_model = read_or_guess_model(config.model.hf_checkpoint, is_moe=is_moe)
        if known_model.missing and self.options.strict:
            raise ConfigError([f"model.hf_checkpoint: {known_model.missing}"], str(self.recipe))
        return known_model

    def _outline(self, config: TrainConfig, parallel: ParallelConfig) -> str:
        """Describe the recipe in a line: algorithm, features, layout."""
        parts = ", ".join(verdict.features(config))
        layout = Layout.of(parallel.sizes).describe()
        servers = config.engine.servers_to_start + len(config.engine.urls)
        return f"{parts}; {parallel.world_size} ranks, {layout}; {servers} servers"

    def _print_sources(
        self,
        config: TrainConfig,
        known_model: KnownModel,
        tokenizer_source: str | None,
        problems: Problems,
    ) -> None:
        """Print which inputs are the recipe's own, and what replaces the missing inputs."""
        replacements = {omission.key: omission.reason for omission in problems.absent}
        if known_model.missing:
            replacements["model.hf_checkpoint"] = known_model.missing
        elif tokenizer_source is None:
            replacements["model.hf_checkpoint"] = shrinking.NO_TOKENIZER
        keys = ["model.hf_checkpoint", "data.train"]
        keys += [f"data.evaluation.{name}" for name in config.data.evaluation_files]
        for key in keys:
            say(f"  {key}: {replacements.get(key, 'the recipe has it here')}")

    def _placement(self, config: PolicyConfig) -> Placement | None:
        """Place the recipe's own ranks and servers on the cluster that the options describe."""
        if self.options.nodes is None:
            return None
        hosts = []
        for number in range(self.options.nodes):
            name = f"node{number}"
            hosts.append(Host(name, name, self.options.gpus_per_node))
        try:
            return place(Roles.of(config), Allocation(tuple(hosts)))
        except PlacementError as error:
            fault = str(error)
            # The fault of too few nodes may name no key of the recipe.
            if "parallel." not in fault and "engine." not in fault:
                fault = f"parallel.world_size: {fault}"
            raise ConfigError([fault], str(self.recipe)) from error

    def _set_aside(self) -> None:
        """Rename the folder of an earlier rehearsal; delete the generated folders of a refused rehearsal."""
        if fault := folder_fault(self.directory):
            raise ConfigError([f"--directory: {fault}"], str(self.recipe))
        if (self.directory / CONFIG).exists():
            say(f"the earlier rehearsal is now {rename_with_time(self.directory)}")
        elif self.directory.exists():
            # The folder of a refused rehearsal has no configuration, only these generated folders.
            for name in ("model", "problems", "check"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)

    def _write_tokenizer(self, config: PolicyConfig) -> str | None:
        """Write the recipe's tokenizer, or a byte-level one, into ``model``; return the folder of the recipe's."""
        source = None
        if has_tokenizer(config.model.hf_checkpoint):
            source = config.model.hf_checkpoint
        write_tokenizer(self.model, source)
        return source

    def _refuse_absent(self, problems: Problems) -> None:
        """Raise ConfigError with ``--strict`` if files of data are absent."""
        if problems.absent and self.options.strict:
            faults = [f"{omission.key}: {omission.reason}" for omission in problems.absent]
            raise ConfigError(faults, str(self.recipe))

    def _problems(self, config: TrainConfig, parallel: ParallelConfig) -> Problems:
        tokenizer = load_tokenizer(self.model)
        count = shrinking.problems_needed(config, parallel)
        folder = self.directory / "problems"
        toy_metadata = metadata_of_toys(config.reward, config.environment)
        problems = make_problems(config.data, tokenizer, folder, count, toy_metadata)
        self._refuse_absent(problems)
        return problems

    def _check_recipe(
        self,
        config: TrainConfig,
        known_model: KnownModel,
        tokenizer_source: str | None,
        problems: Problems,
    ) -> None:
        """Check the recipe's own values with the config.json of the recipe's model.

        Paths of files that are not on this machine are replaced, so that every other fault is found. Raises
        ConfigError.
        """
        folder = _write_folder(self.directory / "check", known_model, tokenizer_source)
        absent_keys = {omission.key for omission in problems.absent}
        evaluation = dict(config.data.evaluation)
        for name in evaluation:
            if f"data.evaluation.{name}" in absent_keys:
                evaluation[name] = problems.evaluation[name]
        data: dict[str, Any] = {"evaluation": evaluation}
        if "data.train" in absent_keys:
            data["train"] = problems.train[0]
        distillation = config.distillation
        teachers = {
            name: teacher.model_copy(
                update={"hf_checkpoint": self._folder_of_teacher(teacher, tokenizer_source)}
            )
            for name, teacher in distillation.teachers.items()
        }
        checkable_config = config.model_copy(
            update={
                "distillation": distillation.model_copy(update={"teachers": teachers}),
                "model": config.model.model_copy(update={"hf_checkpoint": folder}),
                "data": config.data.model_copy(update=data),
            }
        )
        faults: list[str] = []
        try:
            check_config(checkable_config, str(self.recipe), weights=False)
        except ConfigError as error:
            faults += error.faults
        if (fault := folder_fault(Path(config.run.directory))) is not None:
            faults.append(f"run.directory: {fault}")
        faults += _engine_table_faults(config)
        if config.lora.start_from is not None and not Path(config.lora.start_from).is_dir():
            faults.append(f"lora.start_from: got {config.lora.start_from!r}, expected a folder")
        if faults:
            raise ConfigError(faults, str(self.recipe))

    def _folder_of_teacher(self, teacher: TeacherConfig, tokenizer_source: str | None) -> str:
        """Return the folder of a teacher's model, or a folder with the config.json of the known model of its name.

        If there is neither, the folder of the recipe is returned, so that the check names it.
        """
        try:
            known_model = read_model(teacher.hf_checkpoint)
        except ModelError:
            return teacher.hf_checkpoint
        folder = self.directory / "check" / Path(teacher.hf_checkpoint).name
        return _write_folder(folder, known_model, tokenizer_source)

    def _files(self, problems: Problems, tokenizer_source: str | None) -> RehearsalInputs:
        """Return the inputs of a rehearsal on this machine's CPUs that replaces only files."""
        return RehearsalInputs(
            directory=self.run_directory,
            model=self.model,
            train=problems.train,
            evaluation=problems.evaluation,
            longest_prompt=problems.longest,
            has_own_tokenizer=tokenizer_source is not None,
        )

    def _inputs(
        self, config: TrainConfig, problems: Problems, tokenizer_source: str | None
    ) -> RehearsalInputs:
        servers = config.engine.servers_to_start
        if self.options.on_nodes is None:
            servers = max(1, self.options.servers)
        inputs = replace(
            self._files(problems, tokenizer_source),
            servers=servers,
            node_device=self.options.on_nodes,
            unreachable=_unreachable(absent_services(config)),
        )
        if problems.has_toys and config.reward.name not in _REWARDS_OF_SUMS:
            inputs = replace(inputs, scores_toys=_scores_toys(config, problems))
        return inputs

    def _make_model(
        self,
        config: PolicyConfig,
        inputs_of_recipe: RecipeInputs,
        inputs: RehearsalInputs,
        longest: int,
    ) -> None:
        """Write a tiny model of the recipe's family. ``longest``: tokens of the longest sequence."""
        known_model = inputs_of_recipe.known_model
        shape = known_model.shape
        layout = inputs_of_recipe.parallel.sizes
        all_to_all = config.megatron.get("cp_comm_type") == "a2a"
        sizes = tiny_sizes.tiny_sizes(layout, shape, longest, all_to_all=all_to_all)
        if isinstance(config, TrainConfig):
            ranks_of_server = server_ranks(config.sglang)
            if config.engine.quantization is not None:
                sizes = tiny_sizes.sizes_for_blocks(sizes, layout, shape, ranks_of_server)
            elif inputs.on_gpus:
                sizes = tiny_sizes.sizes_for_kernels(sizes, layout, shape, ranks_of_server)
        values = tiny_model.tiny_config(known_model, sizes, own_tokenizer=inputs.has_own_tokenizer)
        count = write_model(inputs.model, values, config.model.dtype, config.run.seed)
        say(f"  a random {shape.family} of {count:,} parameters: {sizes.describe()}")

    def _print_estimate(self, rehearsal_config: TrainConfig) -> None:
        """Print a rough estimate of the runs' memory and time, and warn of too little memory."""
        import psutil

        ranks = rehearsal_config.parallel.world_size
        servers = rehearsal_config.engine.servers_to_start
        if self.options.on_nodes is not None:
            say(f"  {ranks} ranks and {servers} of SGLang's servers start on the nodes")
            return
        needed_bytes = (ranks * _RANK_MIB + servers * _SERVER_MIB) * MIB
        free_bytes = psutil.virtual_memory().available
        cores = this_machine().cores
        # Assumption: each rank, and all servers together, keep at most one core busy.
        minutes = (_STARTS_CPU_S + ranks * _RANK_CPU_S) / min(cores, ranks + 1) / 60
        say(
            f"  {ranks} ranks and {servers} of SGLang's servers on {cores} cores take about {minutes:.0f} minutes if "
            f"nothing else runs, and {gib(needed_bytes)} of memory; {gib(free_bytes)} are free"
        )
        if needed_bytes > free_bytes:
            say("  warning: that may be too little memory; --ranks rehearses a smaller layout")

    def _train(
        self,
        rehearsal_config: TrainConfig,
        omissions: Sequence[Omission],
        placement: Placement | None,
    ) -> int:
        """Run the configuration until it is stopped, and then to its end; judge the runs and return the exit code."""
        last = rehearsal_config.run.steps
        first_label = f"start, train, be stopped after step {STOP_AFTER}"
        second_label = "start again, resume, train, evaluate, export, compare"
        planned_runs = (
            attempts.PlannedRun(
                first_label, lambda step: "start" if step < 0 else "train", STOP_AFTER
            ),
            attempts.PlannedRun(second_label, _resumed_phases(last)),
        )
        runs = self.run_planned(planned_runs, last)
        code = self._conclude(
            runs,
            rehearsal_config,
            verdict.exercised(rehearsal_config),
            omissions,
            placement,
            lambda: self._findings(rehearsal_config, was_resumed=len(runs) > 1),
        )
        if code == 0:
            CONSOLE.print(f"next:\n  {self._next_commands()}", soft_wrap=True, markup=False)
        return code

    def run_planned(
        self, planned_runs: Sequence[attempts.PlannedRun], last: int
    ) -> list[attempts.RehearsalRun]:
        """Make the planned runs, until one fails, or is interrupted, or ends after step ``last``."""
        runs: list[attempts.RehearsalRun] = []
        for planned in planned_runs:
            with self.phases.phase(planned.label):
                run = attempts.run_attempt(
                    planned, self.config_path, self.run_directory, self.usage, self.form
                )
            runs.append(run)
            # The first run may have ended before the stop.
            has_ended = last_step(self.run_directory) >= last and run.code == 0
            if run.was_interrupted or run.has_failed or has_ended:
                break
        return runs

    def _findings(self, rehearsal_config: TrainConfig, *, was_resumed: bool) -> list[VerdictRow]:
        """Compare the results of the finished runs with the bounds of healthy runs, and print the runs' phases."""
        summary = json.loads((self.run_directory / SUMMARY_FILE).read_bytes())
        phases = summary["seconds_per_phase"].items()
        phase_seconds = ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases)
        CONSOLE.print(f"seconds inside the runs: {phase_seconds}", soft_wrap=True)
        records = read_records(self.run_directory)
        return findings(rehearsal_config, summary, records, was_resumed=was_resumed)

    def _conclude(
        self,
        runs: Sequence[attempts.RehearsalRun],
        rehearsal_config: PolicyConfig,
        parts: Sequence[str],
        omissions: Sequence[Omission],
        placement: Placement | None,
        compare: Callable[[], Sequence[VerdictRow]],
    ) -> int:
        """Print and write the verdict on the runs; return the exit code. ``compare``: finished runs' findings."""
        run = runs[-1]
        if run.was_interrupted:
            return INTERRUPTED
        rows = [] if run.has_failed else compare()
        faults = []
        for row in rows:
            if row.holds is False:
                faults.append(f"{row.label} {row.measured}, expected {row.expected}")
        passed = not run.has_failed and not faults
        self._write(rehearsal_config, parts, rows, omissions, runs, passed=passed)
        if run.has_failed:
            _fail(self.phases.current, run.failure(), attempts.key_of(run.errors))
            return FAILED
        on_nodes = self.options.on_nodes
        never = verdict.NEVER if on_nodes is None else verdict.NEVER_ON_NODES[on_nodes]
        verdict.show(CONSOLE, rows, omissions, self.usage, parts, never)
        total = sum(self.phases.seconds.values())
        cost = f"took {total:.0f} seconds"
        # Ranks and servers on the nodes of a job are no children of this process, so their time is unknown.
        if on_nodes is None:
            cpu_seconds = self.imports_cpu_seconds + sum(run.cpu_seconds for run in runs)
            cost += f", and {cpu_seconds:.0f} CPU seconds of ranks and servers"
        CONSOLE.print(cost, soft_wrap=True)
        if placement is not None:
            CONSOLE.print(f"on {self.options.nodes} nodes:\n{placement.table()}", soft_wrap=True)
        if faults:
            _fail("judge", "; ".join(faults))
            return FAILED
        layout = describe_layout(rehearsal_config.parallel.model_dump())
        CONSOLE.print(
            f"passed: {self.options.called or self.recipe} works on {layout} with a tiny model",
            soft_wrap=True,
        )
        return 0

    def _next_commands(self) -> str:
        if self.options.on_nodes is not None:
            return f"megatron-dppo slurm submit {self.options.called}"
        words = shlex.join([str(self.recipe), *self.options.overrides])
        nodes = self.options.nodes or "NODES"
        return (
            f"megatron-dppo plan {words} --gpu h100 --nodes {nodes}\n"
            f"  megatron-dppo slurm submit {words} --dry-run"
        )

    def _write(
        self,
        rehearsal_config: PolicyConfig,
        parts: Sequence[str],
        rows: Sequence[VerdictRow],
        omissions: Sequence[Omission],
        runs: Sequence[attempts.RehearsalRun],
        *,
        passed: bool,
    ) -> None:
        """Write ``rehearsal.json`` for scripts."""
        phases = {}
        for phase, used in self.usage.by_phase.items():
            phases[phase] = {
                "seconds": used.seconds,
                "cpu_seconds_of_ranks": used.rank_seconds,
                "cpu_seconds_of_others": used.other_seconds,
                "memory_mib": _mib(used.fullest),
            }
        result = {
            "recipe": str(self.recipe),
            "passed": passed,
            "ranks": rehearsal_config.parallel.world_size,
            "exercised": list(parts),
            "findings": [asdict(row) for row in rows],
            "not_exercised": [asdict(omission) for omission in omissions],
            "seconds": self.phases.seconds,
            "cpu_seconds": [self.imports_cpu_seconds, *(run.cpu_seconds for run in runs)],
            "phases": phases,
        }
        text = json.dumps(result, indent=2) + "\n"
        (self.directory / RESULT).write_text(text, encoding="utf-8")


def _absent_parts(known_model: KnownModel, problems: Problems) -> list[Omission]:
    """Return the omissions of the recipe's files and model that are not on this machine."""
    omissions = list(problems.absent)
    if known_model.missing:
        omissions.append(Omission("model.hf_checkpoint", known_model.missing))
    return omissions


def _write_folder(folder: Path, known_model: KnownModel, tokenizer_source: str | None) -> str:
    """Write a model's config.json and a tokenizer into ``folder``, and return the folder."""
    write_tokenizer(folder, tokenizer_source)
    (folder / "config.json").write_text(json.dumps(dict(known_model.values)), encoding="utf-8")
    return str(folder)


def _mib(sample: UsageSample | None) -> dict[str, float | bool] | None:
    if sample is None:
        return None
    return {
        "rank_mean": sample.mean_rank / MIB,
        "rank_most": max(sample.ranks) / MIB,
        "all": sample.total / MIB,
        "is_proportional": sample.is_proportional,
    }


def _engine_table_faults(config: TrainConfig) -> list[str]:
    """Return SGLang's errors about the options that a rehearsal on CPUs drops, apart from ``ENGINE_SIZES``.

    The start of the rehearsal's server checks the options that the rehearsal keeps.
    """
    table = {
        key: value
        for key, value in config.sglang.items()
        if key not in shrinking.UNCHECKED_ENGINE_OPTIONS
    }
    if not forwarded.SGLANG.free(table):
        return []
    try:
        return table_faults_elsewhere(table, sys.executable)
    except forwarded.LibraryMissingError as error:
        return [f"sglang: can't be checked: {error}"]


def _commented(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the first lines of the rehearsal's configuration: each key that differs, with both values."""
    lines = [
        "# Made by megatron-dppo rehearse. Keys that differ from the recipe's: recipe -> here."
    ]
    for key, (recipe_value, value) in changes.items():
        lines.append(f"# {key}: {short_json(recipe_value)} -> {short_json(value)}")
    return "\n".join(lines) + "\n"


_REWARDS_OF_SUMS = ("math_verify", "exact_integer")
"""Rewards that score toy problems. The toy problems are sums."""


def _scores_toys(config: TrainConfig, problems: Problems) -> bool:
    """Whether the recipe's rewards can score toy problems: some need columns that only the recipe's data has."""
    lines = Path(problems.train[0]).read_text(encoding="utf-8").splitlines()
    # A toy row has the prompt first, then the answer, under the keys of the recipe's file.
    prompt, answer, *_ = json.loads(lines[0]).values()
    metadata = metadata_of_toys(config.reward, config.environment)
    problem = Problem(0, str(prompt), str(answer), (0,), metadata=metadata)
    toys = ProblemSet((problem,), 0, "", 1)
    faults = reward_faults(problems.train[0], toys, config.reward, shrinking.RESPONSE_TOKENS)
    return not list(faults)


def _unreachable(faults: Sequence[str]) -> dict[str, str]:
    """Return the keys of option tables whose service does not answer, each with the reason."""
    reasons = {}
    for fault in faults:
        # A fault begins with a key of the table, for example ``reward.options.url``.
        key, _, reason = fault.partition(": ")
        table = key
        if "options" in key:
            table = key[: key.index("options") + len("options")]
        reasons[table] = f"{reason}; the rehearsal runs without it"
    return reasons


def _resumed_phases(last: int) -> attempts.PhaseOf:
    """Return the function that names the phases of the second run. The second run ends after step ``last``.

    Both runs write one file of records, so the last recorded step does not change until the second run has resumed.
    """
    step_before: int | None = None

    def phase(step: int) -> str:
        nonlocal step_before
        if step_before is None:
            step_before = step
        if step == step_before:
            return "resume"
        if step < last:
            return "train after resume"
        return "export and compare"

    return phase


def _fail(phase: str, reason: str, key: str | None = None) -> None:
    hint = ""
    if key is not None and key not in reason:
        hint = f" (look at {key})"
    print(f"FAILED in {phase!r}: {reason}{hint}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo rehearse",
        description="Run a recipe on this machine's CPUs with a tiny model, all ranks of its layout included.",
        epilog="docs/rehearsal.md: what a rehearsal shows and what it cannot show.",
    )
    add_config_arguments(parser, "recipe")
    parser.add_argument(
        "--nodes",
        type=whole_number(1, 2**14),
        help="number of nodes on which the recipe's ranks and servers are placed",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole_number(1, 2**10),
        default=_GPUS_OF_A_NODE,
        help="GPUs of each node (8)",
    )
    parser.add_argument(
        "--ranks",
        type=positive_count,
        help="largest number of ranks: rehearse a smaller layout of the same kind",
    )
    parser.add_argument(
        "--servers", type=whole_number(1, 64), default=1, help="SGLang servers to start (1)"
    )
    parser.add_argument("--directory", help="folder of the rehearsal (runs/rehearsal-RECIPE)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make the model, the problems and the configuration, and stop",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse where the recipe's model or data is not on this machine",
    )
    # The job of `megatron-dppo slurm submit --rehearse` sets the next options; users do not.
    parser.add_argument("--on-nodes", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    parser.add_argument("--called", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
