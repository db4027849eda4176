"""Names of files in a run's folder whose writers load large libraries."""

MASKED_TOKENS_FILE = "masked_tokens.jsonl"
REPORT_FILE = "report.png"
