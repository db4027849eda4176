"""Rollouts by SGLang: its server process, its protocol, and the platform that lets it run on a CPU.

This package has the platform plugin, so SGLang imports the package in each of its processes. Therefore this file
imports nothing.
"""
