"""Recorded routing beside the JSON: narrow bytes in shared memory, or by a binary GET.

``store`` and ``sglang_plugin`` are the server's side, ``fetching`` the client's; ``notice`` is what the
answer holds in place of the recording.
"""
