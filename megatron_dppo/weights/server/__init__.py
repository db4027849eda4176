"""The modules here run in a server's processes. They receive, place and report weights, by hooks that change SGLang.

As in ``engine.server``, a module also has what a client must know of its change.
"""
