"""The facts that follow from a run's configuration, resolved once.

``RunSpec.of`` checks a configuration and returns its facts in a few frozen parts. A module takes the part that it
reads. A value that the configuration has as a plain field is read there.
"""

from megatron_dppo.spec.model import ModelSpec
from megatron_dppo.spec.placement import Roles
from megatron_dppo.spec.rollout import RolloutSpec
from megatron_dppo.spec.run import RunSpec
from megatron_dppo.spec.servers import ServersSpec
from megatron_dppo.spec.teachers import TeacherSpec
from megatron_dppo.spec.trainer import TrainerSpec

__all__ = [
    "ModelSpec",
    "Roles",
    "RolloutSpec",
    "RunSpec",
    "ServersSpec",
    "TeacherSpec",
    "TrainerSpec",
]
