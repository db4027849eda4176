#!/usr/bin/env python3
"""Conversion between Hugging Face and Megatron checkpoints; same as ``python -m megatron_dppo.convert``."""

import sys

from megatron_dppo.convert import main

if __name__ == "__main__":
    sys.exit(main())
