"""Agents as environments: programs that call the policy by OpenAI's API of chat completions.

``environment.name: agent`` is found by an entry point (``megatron_dppo.environments`` in pyproject.toml), as an
environment of another package is.
"""
