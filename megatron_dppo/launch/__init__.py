"""The processes of a run on one or several machines: the supervisor starts and ends servers and ranks."""
