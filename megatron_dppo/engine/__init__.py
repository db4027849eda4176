"""Rollouts by SGLang: its server process, its protocol, and the platform that lets it run on a CPU.

SGLang imports this package in each of its processes (it holds the platform plugin), so nothing is imported here.
"""
