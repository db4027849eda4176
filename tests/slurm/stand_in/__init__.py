"""A trainer and a server that do nothing, so that a test of the supervisor takes seconds.

Files, fence, stop and exit codes are the real ones: to the supervisor they look like the real trainer and SGLang.
"""
