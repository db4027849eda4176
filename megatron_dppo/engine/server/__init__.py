"""The modules here run in a server's processes. Each changes SGLang by its hooks.

A module also has what a client must know of its change: names of requests, and the form of answers.
"""
