"""Names of files in a run's folder whose writers load torch or matplotlib, which their readers need not."""

MASKED_TOKENS_FILE = "masked_tokens.jsonl"
"""Tokens that the trust region masked, a line a step."""
SAMPLES_FILE = "samples.jsonl"
"""A few responses of each step as text, a line each."""
REPORT_FILE = "report.png"
"""The run's figures."""
