#!/usr/bin/env python3
"""The cost of a step at the recipes' sizes. The report says which figures are computed, simulated or measured.

python tools/scale_report.py             # print it
python tools/scale_report.py --write     # put it into docs/evidence/scale.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmark_rows import PUBLISHED, read_rows  # noqa: E402

from tools.scale.page import page  # noqa: E402
from tools.scale.sizes import sizes  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "scale.md"


def main() -> int:
    """Print or write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/evidence/scale.md")
    parser.add_argument("--benchmarks", type=Path, default=PUBLISHED, metavar="FOLDER",
                        help="of JSON files that benchmarks wrote; default docs/evidence/benchmarks")  # fmt: skip
    options = parser.parse_args()
    text = page(sizes(), read_rows(options.benchmarks))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
