"""Parts of ``tools/bench_data_plane.py``."""
