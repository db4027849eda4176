"""What runs in a server's processes: changes to SGLang, each a module with its hooks.

A module also has what a client must know of its change: names of requests, and the form of answers.
"""
