"""Trainer weights into the engine, as a verified transaction."""
