"""A weight update sends the trainer's weights into the engines, as a verified transaction.

The modules of ``server`` run in a server's processes.
"""
