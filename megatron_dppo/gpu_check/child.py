"""One part in a process of its own: ``python -m megatron_dppo.gpu_check.child MODULE FOLDER GPUS``.

Every row goes to ``rows.jsonl`` as it is found, so that a crash loses none of those before it. The last
line is ``{"end": true}``, or ``{"lacks": "..."}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dppo.gpu_check.part import LackingError, Site, load

ROWS = "rows.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the part; 0, also where it lacks something."""
    module, folder, gpus = sys.argv[1:] if arguments is None else arguments
    site = Site(Path(folder), int(gpus))
    with open(site.folder / ROWS, "w", encoding="utf-8") as file:

        def tell(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for row in load(module).run(site):
                tell(asdict(row))
        except LackingError as lacking:
            tell({"lacks": str(lacking)})
        else:
            tell({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
