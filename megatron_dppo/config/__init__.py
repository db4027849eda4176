"""A run's configuration: the schema, its loading, and every check that needs no heavy library."""

from megatron_dppo.config.checks import check_config, check_supervised_config
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_as, load_config, load_remainder, resolved_yaml
from megatron_dppo.config.schema import SupervisedConfig, TrainConfig

__all__ = [
    "ConfigError",
    "SupervisedConfig",
    "TrainConfig",
    "check_config",
    "check_supervised_config",
    "load_as",
    "load_config",
    "load_remainder",
    "resolved_yaml",
]
