"""Every key of a configuration: its type, its default, and in its docstring its effect and its unit.

Sections are frozen and strict: unknown keys and wrong types are errors. Checks across sections are in ``checks.py``.
Relative paths are relative to the directory that the program is started in. This package loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Field, model_validator

from megatron_dppo.algorithms import table
from megatron_dppo.config.data_schema import DataConfig, EnvironmentConfig, RewardConfig, Section
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import LayoutSizes
from megatron_dppo.model.shape import ModelShape, TrainerPart
from megatron_dppo.system.scratch import SHARED_MEMORY

SLOWEST_TOKENS_PER_S = 10.0
"""Rate that the default timeout of a response assumes. A server under full load is several times as fast."""


class RunConfig(Section):
    """The run's folder, length and start."""

    directory: str
    """Folder of everything the run writes; created."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Seeds the order of the data, the trainer's generators and the engine."""
    steps: int = Field(gt=0)
    """Rollout batches to train on in total, including the batches before the checkpoint that a run resumes from."""
    resume: Literal["auto", "never", "required"] = "auto"
    """``auto``: start from the newest checkpoint, or at step 0 if there is no checkpoint yet. ``never``: start at step
    0 and set aside the files of earlier starts. ``required``: start from a checkpoint, or fail.
    """
    sha256_list: str | None = None
    """File in sha256sum's format with the hashes of inputs (checkpoint, tokenizer, data), compared before every start
    and by ``--check``. File names in it are relative to its own folder.
    """
    show_sample_every: int = Field(default=5, ge=0)
    """Steps between two sample responses on the console; 0: no samples."""
    max_restarts: int = Field(default=3, ge=0)
    """Largest number of restarts of the trainer's ranks within ``restart_window_s``; the servers keep running
    meanwhile. 0: the first death ends the run.
    """
    restart_window_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a restart of the ranks no longer counts."""
    processes_per_core: int = Field(default=8, gt=0, le=2**16)
    """Ranks and servers that a machine without GPUs may run for each of its cores. A run with more processes is
    refused.
    """


class CheckpointSection(Section):
    """Base of the sections that name the folder of a model."""

    hf_checkpoint: str

    def read_shape(self) -> ModelShape:
        """Return the shape of the model in ``hf_checkpoint``. Raises the errors of ``load_model_shape``."""
        return load_model_shape(self.hf_checkpoint)


class ModelConfig(CheckpointSection):
    """The policy."""

    hf_checkpoint: str
    """Hugging Face folder: config.json, safetensors, tokenizer. A run without a checkpoint starts from its weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and activations in the trainer; the optimizer's master weights are fp32."""


class HeadConfig(Section):
    """The output layer. The logits of one chunk of tokens exist at a time; docs/long_context.md."""

    chunk_tokens: int = Field(default=4096, gt=0)
    """Tokens of a chunk. Smaller chunks need less memory; below about 1024 tokens they take noticeable time."""
    dtype: Literal["model", "float32"] = "model"
    """Dtype of the logits in trainer and engines. ``model``: the dtype of the weights. ``float32``: the engines run
    with SGLang's --enable-fp32-lm-head.
    """


class LoraConfig(Section):
    """Low-rank adapters (LoRA) on a frozen model; docs/lora.md."""

    rank: int = Field(default=0, ge=0)
    """Inner dimension of every adapter. 0: no adapters, the whole model is trained."""
    alpha: float | None = Field(default=None, gt=0)
    """Adapters are multiplied by alpha / rank. Empty: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training sets to zero. Above 0, the log-probabilities of a training pass differ
    from the engine's, even with equal weights.
    """
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"])
    """Adapted matrices, by the last part of their name in the checkpoint (``q_proj``, ...), or groups of matrices:
    ``attention``, ``mlp`` (dense), ``experts``, ``head`` (the output layer, if it is not also the embedding),
    ``all-linear`` (all except ``head``).
    """
    experts: Literal["each", "shared"] = "each"
    """``each``: every expert has its own adapters. ``shared``: the experts of a layer share adapters."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A, as in PEFT. ``kaiming``: uniform within +-1/sqrt(inputs). ``gaussian``: normal with standard
    deviation 1/rank. B starts at zero.
    """
    start_from: str | None = None
    """Folder of adapters in PEFT's format to start from. The adapters must have this run's model, rank and modules."""
    train_router: bool = False
    """Train the routers' own weights too."""
    update: Literal["merged", "adapters"] = "merged"
    """Content of a weight update. ``merged``: the whole model, with the adapters added to its weights. ``adapters``:
    only the adapters (attention and dense MLP); SGLang's LoRA applies them.
    """

    @property
    def filled_alpha(self) -> float:
        """``alpha`` with its default filled in."""
        if self.alpha is None:
            return 2.0 * self.rank
        return self.alpha


class RolloutConfig(Section):
    """Sampling of training responses."""

    prompts_per_step: int = Field(gt=0, le=2**20)
    """Prompts in a rollout batch."""
    group_size: int = Field(gt=1, le=2**16)
    """Responses for each prompt. They form a group, and advantages compare their rewards (``algorithm.advantage``)."""
    max_response_tokens: int = Field(gt=0)
    """Longest response in tokens. A response that reaches this length is truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1: truncation does not change the engine's log-probabilities."""
    top_k: int = -1
    """Must be -1 (off), for the reason of ``top_p``."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a response in addition to the model's own end tokens, in training and evaluation. The token that
    ends a response is trained on.
    """
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, in training and evaluation; docs/data.md."""
    topk_log_probs: int = Field(default=0, ge=0)
    """K: the engine records the log-probabilities of TopK(mu). 0: the algorithm's own K, if it has one."""
    max_concurrent_requests: int = Field(default=256, gt=0)
    """Largest number of requests in flight from one data-parallel leader, the rank that generates for its replica."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time for one response before it is aborted and sampled again. The time of weight updates, and in
    colocated runs of training, does not count. Empty: the time of the longest response at 10 tokens/s, and at least
    600. A limit that long responses reach favours short responses.
    """
    responses_per_call: int = Field(default=1, gt=0)
    """Responses that share one HTTP call. Several are less work for the engine if responses are short. They finish,
    time out and are lost together.
    """
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Largest number of weight versions that a token may lag behind the trainer, and number of batches that are
    generated ahead. 0: generate, then train. 1: batch n+1 is generated while batch n is trained on; see
    docs/staleness.md.
    """
    interrupt: Literal["drain", "retract", "abort"] = "drain"
    """Effect of a weight update on responses in flight. ``drain``: the update waits for them. ``retract``: the engine
    continues them with the new weights. ``abort``: the client requests the rest after the update. docs/staleness.md.

    """
    drop_zero_variance_groups: bool = False
    """Replace groups whose responses all have equal rewards, and so the advantage 0, by groups of further prompts."""
    oversampling: float = Field(default=1.0, ge=1)
    """Groups that a generation round requests, as a multiple of the missing groups; above 1 only with
    ``drop_zero_variance_groups``.
    """
    max_generation_rounds: int = Field(default=3, gt=0)
    """Largest number of generation rounds with ``drop_zero_variance_groups``. After the last round, groups with equal
    rewards complete the batch.
    """
    save: bool = False
    """Keep every rollout batch under ``<directory>/rollouts``."""
    replay_from: str | None = None
    """Train on the rollout batches saved in this folder instead of generating; no engine is started."""
    largest_gap: float | None = Field(default=None, gt=0, le=1)
    """Largest mean |pi - mu| of a batch's first mini-batch at equal weights. Above this number, the run stops before it
    trains on the batch. Empty: 0.01 in float32; 0.1 in bfloat16, or if trainer or engine computes in FP8; 0.3 with
    ``engine.quantization: fp8``. Stale and replayed batches are not checked: trainer and engine may have had different
    weights.
    """
    router_replay: bool = False
    """R3: replay the engine's expert choices in the trainer."""

    @property
    def replays(self) -> bool:
        """Whether the run trains on saved batches, so that it has no engine."""
        return self.replay_from is not None

    @property
    def response_timeout_s(self) -> float:
        """``request_timeout_s`` with its default filled in, s."""
        if self.request_timeout_s is not None:
            return self.request_timeout_s
        return max(600.0, self.max_response_tokens / SLOWEST_TOKENS_PER_S)


class AlgorithmConfig(Section):
    """Preset of the algorithm, and changes to it."""

    name: str = "dppo-binary-tv"
    """A name in ``megatron_dppo.algorithms.table``, the name of an installed package's entry point, or
    ``package.module:ROW``; docs/extending.md."""
    settings: table.Settings = "stability"
    """The experiment of the paper that the preset's numbers belong to: the stability study, the scaling runs, the
    scaling run with LoRA (``lora``), or the other models and tasks (``generalization``); docs/algorithms.md.
    """
    options: dict[str, Annotated[float, AllowInfNan()] | int | bool] = Field(default_factory=dict)
    """Changes to the preset's numbers (``tv_threshold``, ``ratio_cap``, ...), checked against the preset."""
    aggregation: table.AggregationName = "sequence-mean-with-constant"
    """Divisor of the summed token losses. ``token-mean``: all trained tokens. ``sequence-mean-with-constant``: all
    sequences, times ``aggregation_constant``. ``sequence-mean-token-sum``: all sequences. ``sequence-mean-token-mean``
    (the objective of GSPO): all sequences, and each token's loss is first divided by the number of trained tokens of
    its sequence. Tokens and sequences of all ranks are counted.
    """
    aggregation_constant: float | None = Field(default=None, gt=0)
    """Constant of ``sequence-mean-with-constant``, in tokens. Empty: ``rollout.max_response_tokens``."""
    reference_kl: float = Field(default=0.0, ge=0)
    """Factor of the KL penalty for leaving the reference policy, the policy that training started from. The penalty is
    added to the loss of every trained token. Above 0 each batch needs one more forward pass, and full training a copy
    of the start weights.
    """
    reference_estimator: table.EstimatorName = "k3"
    """Estimator of the KL penalty at a token. docs/algorithms.md has a table of the KL that each estimator's gradient
    lowers. ``k3`` estimates KL(pi || reference), but its gradient lowers KL(reference || pi).
    """
    reference_importance_weights: bool = False
    """Multiply the KL penalty by min(pi / mu, ``ratio_cap``). The penalty is then correct also if pi differs from the
    policy that sampled.
    """
    truncated_responses: Literal["as-verified", "zero-reward", "drop"] = "zero-reward"
    """Reward of a response that reached the length limit. ``as-verified``: the verifier's reward. ``zero-reward``: 0,
    or the verifier's reward if it is below 0. ``drop``: the verifier's reward counts in the group's baseline, but the
    response has no gradient.
    """
    overlong_tokens: int = Field(default=0, ge=0)
    """Tokens before ``rollout.max_response_tokens`` over which a penalty on the reward rises linearly from 0 to 1
    (DAPO's soft overlong penalty). 0: no penalty. ``truncated_responses`` changes the reward before the penalty does.
    """
    length_penalty: float = Field(default=0.0, ge=0, le=1e18)
    """Reward that a response of ``rollout.max_response_tokens`` tokens loses; a shorter response loses less, in
    proportion to its length.
    """
    advantage: table.AdvantageName = "group-mean"
    """Advantage of a response. ``group-mean``: its reward minus the mean of its group. ``leave-one-out``: its reward
    minus the mean of the other responses (RLOO). ``group-standardized``: ``group-mean`` divided by the group's standard
    deviation (GRPO). docs/rewards.md.
    """

    def facts(self) -> table.AlgorithmFacts:
        """Return the preset with the numbers in force. Raises ValueError for an unknown name or option, or a bad
        value.
        """
        return table.algorithm_facts(self.name, self.options, self.settings)


class TeacherConfig(CheckpointSection):
    """A model that scores the tokens that the policy sampled, on SGLang servers."""

    hf_checkpoint: str
    """Hugging Face folder of the teacher. The teacher's tokenizer must map the policy's ids to the same tokens.
    """
    servers: int | None = Field(default=None, ge=0, le=2**16)
    """Servers that the run starts. Empty: 1, or 0 if ``urls`` has servers."""
    urls: list[str] = Field(default_factory=list)
    """Addresses of servers that already run and serve ``hf_checkpoint``."""
    prompt_template: str | None = None
    """Prompt that the teacher sees in place of the policy's: one user message, with ``{prompt}``, ``{answer}`` and the
    names of the problem's metadata in braces. Empty: the policy's prompt.
    """
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Longest prompt of ``prompt_template`` in tokens; a run with a longer one is refused. Empty:
    ``data.max_prompt_tokens``.
    """
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Forwarded to SGLang's ServerArgs of this teacher's servers."""

    @property
    def servers_to_start(self) -> int:
        """``servers`` with its default filled in."""
        if self.servers is not None:
            return self.servers
        return 0 if self.urls else 1


class DistillationConfig(Section):
    """Teachers, and the loss that draws the policy to them; docs/distillation.md."""

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name. Empty: no distillation."""
    teacher_key: str = "teacher"
    """Name in a problem's metadata whose value is the name of the problem's teacher. With a single teacher, problems
    need no such value.
    """
    loss: table.DistillationLoss = "sampled"
    """``sampled``: the advantage log p_T - log pi of each sampled token. ``reverse``: KL(pi || p_T) at each token, over
    TopK(p_T), the sampled token and one bucket for the other tokens. ``forward``: KL(p_T || pi), likewise.
    """
    top_k: int = Field(default=0, ge=0)
    """Ids of TopK(p_T) that a teacher returns for each sampled token. 0 for ``sampled``; at least 1 for the others."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the distillation loss."""
    rewards: bool = True
    """Learn from the rewards too. false: the teachers replace the rewards' advantages; rewards are still measured."""
    masked: bool = True
    """Apply the algorithm's mask to the distillation loss. A token's direction is then the sign of log p_T - log pi,
    or of the whole advantage with ``sampled``.
    """
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time of one attempt to score a sequence; after four attempts the response has no scores."""


class ParallelConfig(Section):
    """Megatron-Core's layout. Data parallelism is the rest of the world size."""

    world_size: int = Field(default=1, gt=0, le=2**20)
    """Trainer processes (ranks), one on each device."""
    tensor: int = Field(default=1, gt=0)
    """Ranks that share each matrix of the dense layers (TP)."""
    context: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each sequence (CP); docs/long_context.md says when to use it."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline stages (PP)."""
    virtual_pipeline: int | None = Field(default=None, gt=1)
    """Model chunks in each pipeline stage (interleaved 1F1B)."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the first pipeline stage, for models whose layers the stages do not divide evenly (94 layers on 4
    stages: 23, 24, 24, 23). Empty: the same number as the other stages.
    """
    last_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the last pipeline stage. This stage also computes the output layer and the loss. Empty: the same number
    as the other stages.
    """
    expert: int = Field(default=1, gt=0)
    """Ranks among which the experts are divided (EP)."""
    expert_tensor: int | None = Field(default=None, gt=0)
    """Ranks that share each matrix of an expert (ETP). Empty: ``tensor`` if expert is 1, else 1."""
    sequence: bool | None = None
    """Sequence parallelism. Empty: on if tensor > 1 and the model is a mixture of experts."""

    interface: str | None = None
    """Name or address of the network interface that ranks listen on. Empty: loopback on one machine; on several, gloo
    and NCCL choose it, and rank 0 listens on MASTER_ADDR.
    """
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time of a collective. A rank that waits longer ends, and reports the collective and the ranks that it
    waited for. The limit is longer while ranks wait for others to generate, start, save or update weights.
    """

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes of this section as ``model/layout.py`` checks them."""
        return LayoutSizes(**self.model_dump(exclude={"interface", "collective_timeout_s"}))

    @property
    def data(self) -> int:
        """Data-parallel ranks of the dense layers: the world size divided by tensor, context and pipeline."""
        return self.sizes.data


class StepConfig(Section):
    """How one optimiser step is divided and computed."""

    micro_batch_tokens: int = Field(gt=0)
    """Token budget of a packed micro-batch; a longer sequence is a micro-batch of its own. With context parallelism
    each rank of a CP group holds its share of these tokens.
    """
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. ``full`` recomputes every layer. ``selective`` recomputes the core attention. For
    mixtures of experts on GPUs, ``selective`` recomputes the experts' activation function and the norms instead.
    ``megatron.recompute_modules`` replaces this choice.
    """


class TrainingConfig(StepConfig):
    """Optimiser steps of a rollout batch."""

    prompts_per_mini_batch: int = Field(gt=0)
    """Prompts (whole groups) in one optimiser step; divides ``rollout.prompts_per_step``."""


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, and the schedule of its learning rate."""

    lr: float = Field(gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. ``constant``: ``lr``. ``linear``, ``cosine``: it falls to ``min_lr``, linearly
    or as half a cosine.
    """
    decay_steps: int | None = Field(default=None, gt=0)
    """Optimiser steps, including the warm-up, after which the rate stays at ``min_lr``. Empty only with the
    constant schedule. A rollout batch of several mini-batches counts as several optimiser steps.
    """
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a falling schedule."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of an update."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Every step subtracts ``weight_decay`` times the learning rate times the weight."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; a larger gradient is scaled down to it. 0: no clipping."""
    distributed: bool | None = None
    """Shard the optimizer's state over ranks that have the same weights. Empty: on in bfloat16 with several ranks."""


class EngineConfig(Section):
    """The fleet of SGLang servers; docs/fleet.md describes it."""

    servers: int | None = Field(default=None, ge=0, le=2**16)
    """Servers that the run starts, each with ``sglang.tp_size`` ranks. Empty: 1, or 0 if ``urls`` has servers."""
    urls: list[str] = Field(default_factory=list)
    """Addresses of servers that already run. The run uses them in addition to the servers that it starts."""
    ca_file: str | None = None
    """PEM file of the authorities that sign the certificates of ``https`` servers in ``urls``. Empty: the system's
    authorities.
    """
    passed_variables: list[str] = Field(default_factory=list)
    """Environment variables with credentials that the run passes on to the servers that it starts;
    docs/shared_hosts.md.
    """
    host: str = "127.0.0.1"
    """Address that servers listen on; loopback by default."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port of the first server; the next servers take the next ports. Empty: free ports."""
    router: bool | None = None
    """Send generation through a router (smg) on this machine. Empty: true if there are several servers."""
    router_policy: Literal["power_of_two", "cache_aware", "round_robin", "consistent_hashing"] = (
        "power_of_two"
    )
    """The router's rule to choose a server. ``power_of_two``: the less loaded of two random servers. ``cache_aware``:
    the server whose cache has the prompt's beginning. ``consistent_hashing``: by the prompt's hash.
    """
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time for a server to start, and longest wait of a run while no server is healthy."""
    hang_timeout_s: float = Field(default=60.0, gt=0)
    """A server counts as lost if it answers nothing for this time, not even health checks. Until the first answer of a
    server of ``urls``, ``start_timeout_s`` applies instead.
    """
    max_restarts: int = Field(default=3, ge=0)
    """Largest number of restarts of each server within ``restart_window_s``. If no server is left, the run saves a
    checkpoint and ends.
    """
    restart_window_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a restart of a server no longer counts."""
    device: Literal["cpu", "cuda"] | None = None
    """Device of the servers. Empty: ``cuda`` on a machine with GPUs, else ``cpu``."""
    placement: Literal["separate", "colocated"] = "separate"
    """``separate``: servers and trainer have different devices. ``colocated``: trainer and servers take turns on the
    same devices, and the waiting side keeps its memory on the host; see docs/colocation.md.
    """
    parked: list[TrainerPart] | None = Field(default=None, min_length=1)
    """Parts that a colocated trainer moves to the host while servers generate; ``megatron-dppo plan`` prints the parts
    that must move. Empty: all parts.
    """
    deterministic: bool = False
    """Sample every response with its own seed, so that a second run with equal seed, weights and machine samples the
    same responses; docs/fleet.md.
    """
    quantization: Literal["fp8"] | None = None
    """``fp8``: servers hold linear layers and experts as block FP8 and round activations to FP8; docs/fleet.md. Empty:
    the trainer's dtype.
    """
    atomic_updates: bool = False
    """Servers that the run starts keep the tensors of a weight update in host memory until the update is complete.
    After an interrupted update they serve the previous version again. false: they stay paused until the next update.
    docs/weight_sync.md.

    """
    python: str | None = None
    """Python interpreter of the servers and their router, with this package, SGLang and smg installed. Empty: the
    trainer's interpreter.
    """

    @property
    def servers_to_start(self) -> int:
        """``servers`` with its default filled in."""
        if self.servers is not None:
            return self.servers
        return 0 if self.urls else 1

    @property
    def uses_router(self) -> bool:
        """``router`` with its default filled in."""
        if self.router is None:
            return self.servers_to_start + len(self.urls) > 1
        return self.router


class WeightSyncConfig(Section):
    """Weight updates from trainer to engines."""

    strategy: Literal["distributed", "tensor", "disk"] = "distributed"
    """``distributed``: over NCCL or gloo, to each engine rank only what it keeps. ``tensor``: memory that an engine
    shares with a trainer rank on its host. ``disk``: a folder that the engines read.
    """
    bucket_mib: int | None = Field(default=None, gt=0, le=2**20)
    """MiB of weights in one message, in one batch of messages (``tensor``), or in one bucket of whole tensors
    (``disk``). Empty: 128 with ``distributed``, else 512.
    """
    network_gb_per_s: float | None = Field(default=None, gt=0)
    """Network bandwidth into a node, GB/s (1e9 bytes), from which ``weights/bound_s`` is computed."""
    changes_only: bool = False
    """With all but ``disk``: send only the elements that changed since the last update; docs/weight_sync.md."""
    verify_every: int = Field(default=1, gt=0)
    """Compare a hash of every tensor at every n-th update; with ``changes_only`` at every update."""
    canary_every: int = Field(default=1, ge=0)
    """Compare fixed prompts' log-probabilities in trainer and engines at every n-th update; 0: never."""
    canary_largest: float | None = Field(default=None, gt=0)
    """Largest difference of one token's log-probability, nats, that the canary accepts as rounding. Empty: by
    the dtype of the weights; docs/weight_sync.md.
    """
    canary_mean: float | None = Field(default=None, gt=0)
    """Largest mean difference of the log-probabilities, nats, that the canary accepts as rounding. Empty: by the
    dtype of the weights; docs/weight_sync.md.
    """
    directory: str | None = Field(default=None, min_length=1)
    """Folder of the strategy ``disk``; trainer and engines must see it under the same path. Empty: ``/dev/shm``, for
    engines on the trainer's host.
    """
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest time of one request to an engine: to receive all weights (``tensor``: a batch), to hash, to be idle."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mib`` in bytes, with its default filled in."""
        mib = self.bucket_mib
        if mib is None:
            mib = 128 if self.strategy == "distributed" else 512
        return int(mib * 2**20)

    @property
    def update_folder(self) -> Path | None:
        """Folder in which each update is written, in this host's memory by default; None if no folder is written."""
        if self.strategy != "disk":
            return None
        return Path(self.directory or SHARED_MEMORY)

    def message_bytes(self, ranks: int, hosts: int) -> int:
        """Return the largest size of a message to a rank of a server of ``ranks`` ranks; the servers have ``hosts``.

        With ``tensor``, a batch has room for a message to each rank of the server, and a trainer rank receives as much
        from each host.
        """
        return (
            self.bucket_bytes // (ranks * hosts) if self.strategy == "tensor" else self.bucket_bytes
        )


class EvaluationConfig(Section):
    """avg@k on the held-out sets."""

    every: int = Field(default=5, gt=0)
    """Steps between two evaluations; the run also evaluates before its first and after its last step."""
    samples_per_prompt: int = Field(default=32, gt=0, le=2**16)
    """The k of avg@k: responses whose rewards are averaged."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature. 0: the engine chooses the most probable token (greedy), so that all responses to a prompt
    are equal; set ``samples_per_prompt: 1``.
    """
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Top-p: the engine samples from the fewest tokens whose probabilities add up to this number."""
    max_response_tokens: int | None = Field(default=None, gt=0)
    """Longest response in tokens. Empty: as in training."""


class StoredCheckpointsConfig(Section):
    """Megatron distributed checkpoints under ``<directory>/checkpoints``."""

    every: int = Field(default=20, gt=0)
    """Steps between two checkpoints; the run also saves at its end and at a clean stop."""
    keep: int = Field(default=2, gt=0)
    """Newest complete checkpoints to keep."""
    background: bool = True
    """Copy a rank's share to host memory, and write this copy while training continues. false: training waits for the
    disk.
    """
    on_damage: Literal["refuse", "previous"] = "refuse"
    """Reaction if the newest checkpoint is damaged. ``refuse``: do not start. ``previous``: start from the checkpoint
    before it.
    """


class CheckpointConfig(StoredCheckpointsConfig):
    """Megatron distributed checkpoints under ``<directory>/checkpoints``, and the export."""

    keep_responses: bool = True
    """Keep the scored responses since the newest checkpoint under ``<directory>/spool``, with all their columns. Ranks
    that start again from it train on the kept responses and sample only the missing ones; docs/failures.md.
    """
    export_hf: bool = True
    """Write the final policy as a Hugging Face folder, ``<directory>/hf``."""
    verify_export: bool = False
    """Load the export with transformers on rank 0 and compare log-probabilities; this needs host memory for the whole
    model.
    """
    upload: str | None = None
    """``OWNER/NAME`` of a repository of huggingface.co. At its end the run uploads the export to it, as ``convert
    upload`` does; a new repository is private.
    """


class MemoryChecksConfig(Section):
    """Checks for memory that changes although nothing writes to it; docs/memory_checks.md. The trainer's weights are
    always checked. After a mismatch, the ranks start again from the newest checkpoint (``run.max_restarts``).
    """

    optimizer: bool = True
    """Hash Adam's moments and the fp32 masters after a step that is followed by a checkpoint, at the checkpoint and
    before the next step.
    """
    engines_every: int = Field(default=10, ge=0)
    """Hash the engines' weights before every n-th weight update, and compare the hashes with the hashes of the version
    that the engines serve. With ``lora.update: adapters``, hash the frozen model instead. 0: never. Colocated engines
    are not checked.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_reactions(cls, values: Any) -> Any:
        """Accept ``on_mismatch`` and ``max_restores``, which stored configurations have, and ignore both.

        After every mismatch the ranks end, and the supervisor starts them again from the newest checkpoint.
        """
        if not isinstance(values, dict):
            return values
        return {key: v for key, v in values.items() if key not in ("on_mismatch", "max_restores")}


class ProfileConfig(Section):
    """Traces of single steps, under ``<directory>/profile``, for chrome://tracing or Perfetto."""

    steps: list[int] = Field(default_factory=list)
    """Steps to trace, counted from 1. A traced step takes longer, and its file takes tens of MB."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Trainer ranks that trace."""
    memory: bool = False
    """Record allocations too: in the trace, and on GPUs in a snapshot for pytorch.org/memory_viz."""


class TrackingConfig(Section):
    """Experiment trackers beside ``metrics.jsonl``; docs/watching.md."""

    trackers: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, the name of an installed package's entry point, or
    ``package.module:Class``. The trackers' libraries read credentials and addresses from their own environment
    variables.
    """
    metrics: list[str] = Field(default_factory=list)
    """Own metrics of the trained tokens, each the name of an installed package's entry point or ``package.module:ROW``;
    docs/extending.md.
    """
    project: str = Field(default="megatron-dppo", min_length=1)
    """Project in the trackers; TensorBoard has no projects."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run in the trackers. Empty: the name of its folder."""


class PolicyConfig(Section):
    """Sections that the trainer itself reads, in every kind of run."""

    run: RunConfig
    model: ModelConfig
    head: HeadConfig = HeadConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: StepConfig
    optimizer: OptimizerConfig
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Forwarded to megatron.core's TransformerConfig; keys are checked against its fields."""
    megatron_ddp: dict[str, Any] = Field(default_factory=dict)
    """Forwarded to megatron.core's DistributedDataParallelConfig: overlap_grad_reduce, bucket_size, grad_reduce_in_fp32
    (default here: true; false: gradients have the dtype of the weights), and further options."""
    megatron_optimizer: dict[str, Any] = Field(default_factory=dict)
    """Forwarded to megatron.core's OptimizerConfig: log_num_zeros_in_grad, options of low-precision and offloaded state
    (docs/checkpoints.md), and further options.
    """

    @property
    def forwards_to_megatron(self) -> bool:
        """Whether ``megatron``, ``megatron_ddp`` or ``megatron_optimizer`` has keys, to be checked by Megatron-Core."""
        return bool(self.megatron or self.megatron_ddp or self.megatron_optimizer)

    @property
    def token_multiple(self) -> int:
        """A rank's tokens of a micro-batch are padded to a multiple of this number: 1, or what FP8 kernels require."""
        if self.megatron.get("fp8") is None:
            return 1
        if self.megatron.get("fp8_recipe") == "mxfp8":
            return 32
        return 16

    @property
    def distributed_optimizer(self) -> bool:
        """``optimizer.distributed`` with its default filled in."""
        if self.optimizer.distributed is not None:
            return self.optimizer.distributed
        return self.model.dtype == "bfloat16" and self.parallel.data * self.parallel.context > 1

    @property
    def temperature(self) -> float:
        """Divisor of the logits before log-probabilities are computed."""
        return 1.0

    @property
    def router_replay(self) -> bool:
        """Whether routers use the recorded choices of the engine."""
        return False

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer must keep the weights that it started from, because the loss compares with them."""
        return False


class TrainConfig(PolicyConfig):
    """A whole run of reinforcement learning."""

    data: DataConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig = DistillationConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    training: TrainingConfig
    engine: EngineConfig = EngineConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory_checks: MemoryChecksConfig = MemoryChecksConfig()
    profile: ProfileConfig = ProfileConfig()
    tracking: TrackingConfig = TrackingConfig()
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Forwarded to SGLang's ServerArgs; keys are checked against its fields."""

    @property
    def temperature(self) -> float:
        """The engine's sampling temperature: mu and pi must be the same distribution."""
        return self.rollout.temperature

    @property
    def precision(self) -> Literal["float32", "bfloat16", "fp8"]:
        """The coarser of the weights' dtypes in trainer and servers; the normal size of |pi - mu| depends on it."""
        return self.engine.quantization or self.model.dtype

    @property
    def router_replay(self) -> bool:
        """R3, as configured for the rollouts."""
        return self.rollout.router_replay

    @property
    def mini_batches(self) -> int:
        """Optimiser steps on a rollout batch."""
        return self.rollout.prompts_per_step // self.training.prompts_per_mini_batch

    @property
    def mini_batch_responses(self) -> int:
        """Responses of an optimiser step, of all ranks."""
        return self.training.prompts_per_mini_batch * self.rollout.group_size

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence of training: a prompt with a response, or with an episode."""
        prompt = self.data.max_prompt_tokens
        return self.environment.longest(prompt, self.rollout.max_response_tokens)

    @property
    def overlaps(self) -> bool:
        """Whether servers generate and evaluate while the ranks train."""
        return self.rollout.max_staleness > 0 and self.engine.placement != "colocated"

    def passed_variables(self) -> dict[str, list[str]]:
        """Return each list of environment variables that processes of the run receive, by its key."""
        lists = {
            "engine.passed_variables": self.engine.passed_variables,
            "environment.passed_variables": self.environment.passed_variables,
            "reward.passed_variables": self.reward.passed_variables,
        }
        for name, term in self.reward.further.items():
            lists[f"reward.further.{name}.passed_variables"] = term.passed_variables
        return lists

    @property
    def keeps_reference(self) -> bool:
        """Whether a penalty on leaving the start weights is configured."""
        return self.algorithm.reference_kl > 0


class SupervisedDataConfig(Section):
    """Responses to imitate."""

    train: str
    """JSONL, CSV or Parquet file, a folder with such files, or a glob. Each row has a prompt and a ``response``, or a
    conversation under ``messages`` or ``conversations``; docs/how_to.md.
    """
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's messages in a conversation are learned."""
    apply_chat_template: bool = True
    """Wrap a plain-text prompt as one user message in the tokenizer's chat template."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as ``{enable_thinking: false}``."""
    evaluation: dict[str, str] = Field(default_factory=dict)
    """Held-out rows: name -> path, as ``train``. Their loss is measured, and nothing is trained on them."""

    @property
    def files(self) -> dict[str, str]:
        """Each path by its key, ``data.train`` first."""
        held_out = {f"data.evaluation.{name}": path for name, path in self.evaluation.items()}
        return {"data.train": self.train, **held_out}


class SupervisedEvaluationConfig(Section):
    """The loss on held-out rows."""

    every: int = Field(default=100, gt=0)
    """Steps between two evaluations; the run also evaluates before its first and after its last step."""


class SupervisedTrainingConfig(StepConfig):
    """Size of an optimiser step of a supervised run."""

    sequences_per_step: int = Field(gt=0, le=2**24)
    """Pairs in one optimiser step."""


class SupervisedConfig(PolicyConfig):
    """A supervised run: maximum likelihood of the responses; ``run.steps`` counts optimiser steps."""

    data: SupervisedDataConfig
    training: SupervisedTrainingConfig
    evaluation: SupervisedEvaluationConfig = SupervisedEvaluationConfig()
    checkpoint: StoredCheckpointsConfig = StoredCheckpointsConfig(every=100)
    tracking: TrackingConfig = TrackingConfig()
