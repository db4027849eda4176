"""Agents as environments: programs that call the policy by OpenAI's chat completions (``environment.name: agent``).

The environment is found by its entry point (``megatron_dppo.environments`` in pyproject.toml), as a user's own is.
"""
