"""The errors of the package. A RunError ends a run or a command with one line instead of a traceback.

    RunError
      ConfigError                       the configuration is invalid, or this machine can't run it; lists all faults
      InterfaceError                    this machine lacks the named network interface
      UnsafeFileError                   another user owns, or may write, a file of the run
      LeaseError                        another start holds, or may hold, the run's folder
      FencedError                       another start has taken over the run
      ListenError                       the port of the ranks' rendezvous can't be bound
      LaunchError                       the processes of a run can't be started
        PlacementError                  the processes don't fit on the machines
      SlurmError                        a command of Slurm failed
      PreflightError                    too few nodes have passed the checks
      EvidenceError                     a node's file of evidence can't be read
      ModelError                        a model's config.json, layout or checkpoint is invalid
        ModelConfigError
        UnsupportedModelError
        LayoutError
        ProofError
        AdapterError
        CheckpointError
          MismatchError
          DamagedCheckpointError
      DataError                         a data set can't be used
        ToolFormatError                 the configured format reads no tool calls of the chat template
        TurnTemplateError               the text that a chat template inserts after a turn depends on earlier messages
      EnvironmentFaultError             an episode's environment failed; the run continues without the episode
      SandboxError                      this machine has no sandbox for the programs of environments
      VerifierError                     a reward function raised an exception, or its worker can't start
      RewardUnavailableError            a reward's service is down, and new responses did not help either
      InputError                        the input files of the run have changed
      ResumeError                       the checkpoint belongs to other settings
      RecordsError                      the records of a run can't be read
      RecordingError                    the records of a run can't be written
      DisagreementError                 the saved batch of a step disagrees with the records of the step
      BatchFormatError                  a file is not a batch of trajectories
      SealError                         a batch was altered, or was made with other settings than the run has
      AlteredMemoryError                memory changed although nothing wrote to it
        AlteredWeightsError             the trainer's weights changed after the last step, or differ between replicas
        AlteredOptimizerError           Adam's state changed after the last step, or differs between replicas
        AlteredEngineError              an engine's weights differ from the weights of its version
      ExchangeError                     the exchange of trajectories between ranks failed
      StalenessError                    a response was sampled by weights that are too old
      GenerationError                   the servers of an evaluation or a rollout-only run return no responses
      MixedVersionsError                an evaluation has tokens of several weight versions
      WeightsLostError                  no server has the weights to evaluate; the evaluation is dropped
      GapError                          engine and trainer compute different probabilities
      FrequencyError                    tokens are not as frequent as engine and trainer predict
      UnusableGpuError
      NonFiniteLossError
      NonFiniteLogProbsError
      RankError                         the error of one rank, raised on all ranks
      WeightUpdateError                 a weight update failed; raised on all ranks
        WeightUpdateRefusedError
      EngineUnavailableError            no server is left, or none started
        FatalPromptError                a prompt makes servers end
      EngineGivenUpError                a server has used up its restarts
        FirstStartError
      EngineError                       a call between a run and its engine failed
        OtherPlanError                  trainer and engine have different plans of an update in shards
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
        PositionError                   a change of weights lies outside of its bucket
        UnplaceableError                a received tensor is not one of the engine's model
        TransferTimeoutError
        ConnectionBrokenError
        CalledOffError
        StopRequestedError
        GenerationInterruptedError
        ParserLostError
        RecordLostError

The errors below are outside of the tree, because they do not end a run:

    RunStoppedError         all ranks agreed on a clean stop
    FatalError              SystemExit after the line was printed
    LibraryMissingError     becomes a line of a ConfigError
    PortTakenError          becomes a PortHeldError or a LaunchError
    ImportTargetError       a reward, environment, agent or tracker can't be imported: becomes a line of a ConfigError
    PluginError             a faulty plug-in: becomes one line, and other commands run
    KernelBuildError        slower code replaces the kernel, with a warning
    CheckError              becomes a node's evidence
    ChatTemplateError       a chat template fails: becomes a DataError, or a fault of an environment or a reward
    TimeLimitError          a chat template does not end: becomes a ChatTemplateError
    CompressionError        a data file can't be decompressed: becomes a DataError
    RowError                a record of a published data set is left out, and counted
    UnansweredError         a problem has no answer: it is left out and counted, or a fault of its data set
    WorkerLostError         becomes a VerifierError, a score, a ParserLostError, or a fault of an environment
    ProgramError            a caller says which program failed
    LackingError            a part of the GPU check is skipped; the result names it
    OverwrittenLogitsError  a fault in the code: it keeps its traceback
    ParkedError             a fault in the code
    MemoryOrderError        a fault in the code
    RefusedCallError        becomes the HTTP status of the answer to an agent's call
"""

from __future__ import annotations


class RunError(Exception):
    """An error that may end a run or a command. Its message is complete, so no traceback is printed.

    An exception of another type is a fault in the code, or was not foreseen, and keeps its traceback.
    """


class AlteredMemoryError(RunError):
    """Memory of a trainer rank or an engine changed between two checks, although the run did not change it in between.

    The cause is a write to a wrong address, or faulty memory.
    """

    CONSEQUENCE = "nothing is trained on, saved or exported from it"
    """Last clause of each message."""
