"""Trainer weights into the engine, as a verified transaction. The modules of ``server`` run in a server's processes."""
