"""The tree of errors of the package: what may end a run, or a command, with one clear line.

    RunError
      ConfigError                       the configuration, or this machine for it; every fault at once
      InterfaceError                    the network interface that is named
      UnsafeFileError                   a file of the run that somebody else owns or may write
      LeaseError                        another run has the run's folder, or may have it
      FencedError                       another start of this run has succeeded this one
      ListenError                       the port of the ranks' rendezvous
      LaunchError                       the processes of a run can't be started
        PlacementError                  they don't fit the machines
      SlurmError                        a command of Slurm failed
      PreflightError                    too few nodes are fit
      EvidenceError                     a file of what a node found
      ModelError                        a model's config.json, layout or checkpoint
        ModelConfigError
        UnsupportedModelError
        LayoutError
        ProofError
        AdapterError
        CheckpointError
          MismatchError
          DamagedCheckpointError
      DataError                         a data set
        TurnTemplateError               a chat template that can't say what follows a turn
      EnvironmentFaultError             one episode's environment failed; the run goes on without it
      SandboxError                      this machine can't run snippets protected
      VerifierError                     a reward function, or the processes that run it
      RewardUnavailableError            a service that rewards ask is away, and no other response got one either
      InputError                        files that the run starts from have changed
      ResumeError                       a checkpoint of other settings
      RecordsError                      the records of a run can't be read
      RecordingError                    they can't be written
      DisagreementError                 what was saved of a step is not what was recorded of it
      BatchFormatError                  saved trajectories
      SealError                         a batch is not the one that was made, or not made as the run says
      AlteredMemoryError                memory changed that nothing wrote to
        AlteredWeightsError             the trainer's weights are not those that its last step made, or replicas differ
        AlteredOptimizerError           likewise its moments or masters
        AlteredEngineError              an engine's weights are not those of its version
      ExchangeError                     trajectories between ranks
      StalenessError                    a response of too old weights
      GenerationError                   servers of an evaluation or of a rollout-only run give no responses
      MixedVersionsError                an evaluation of more than one version
      WeightsLostError                  no server has the version that is evaluated; it is dropped
      GapError                          engine and trainer compute other probabilities
      FrequencyError                    tokens are not drawn from the probabilities that both compute
      UnusableGpuError
      NonFiniteLossError
      NonFiniteLogProbsError
      RankError                         what one rank failed with, on all of them
      WeightUpdateError                 an update failed on all ranks alike
        WeightUpdateRefusedError
      EngineUnavailableError            no server is left, or could be had
        FatalPromptError                servers end when they are asked for a prompt
      EngineGivenUpError                a server failed for good
        FirstStartError
      EngineError                       between a run and its engine
        EngineStartError
          PortHeldError
        EngineLostError
        ServerLostError
        StaleWeightsError
        EngineRequestError
        AbortedError
        EngineAnswerError
        EngineMismatchError
        IncompleteWeightsError
        EngineFaultError                the engines at fault in a step of an update
        ChecksumMismatchError
        CanaryError
        TransferTimeoutError
        ConnectionBrokenError
        CalledOffError
        StopRequestedError
        GenerationInterruptedError
        ParserLostError
        RecordLostError

These are outside of it, for none of them ends a run:

    RunStoppedError         a clean stop, which all ranks agreed on
    FatalError              the end itself, once its line is printed
    LibraryMissingError     becomes a line of a ConfigError
    PortTakenError          becomes a PortHeldError or a LaunchError
    ImportTargetError       a reward, environment, agent or tracker that can't be imported: a line of a ConfigError
    KernelBuildError        a slower path is taken, and logged
    CheckError              becomes a node's evidence
    ChatTemplateError       a chat template that fails: becomes a DataError, or a fault of an environment or a reward
    TimeLimitError          a chat template that does not end: becomes a ChatTemplateError
    RowError                a record of a published data set is left out, and counted
    UnansweredError         a problem without an answer: left out and counted, or a fault of its data set
    WorkerLostError         becomes a VerifierError, a score, a ParserLostError, or a fault of an environment
    LackingError            a part of the GPU check is skipped, and named
    OverwrittenLogitsError  a fault in the code: with its traceback
    ParkedError             likewise
    RefusedCallError        an agent's call, answered by an HTTP status
    MemoryOrderError        likewise
"""


class RunError(Exception):
    """May end a run or a command: its message says all, so that no traceback follows.

    A RuntimeError, ValueError or OSError that is none of these is a fault in the code, or one that nobody
    foresaw, and keeps its traceback.
    """


class AlteredMemoryError(RunError):
    """Memory of a trainer rank or an engine changed that nothing wrote to: it was overwritten, or is faulty."""

    CONSEQUENCE = "nothing is trained on, saved or exported from it"
    """End of each message."""
