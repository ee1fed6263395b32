"""Settings that every test shares: no hub, one thread per process, quiet libraries."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a hub starts its own, in a child process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from launched import launch_folder, results  # noqa: E402, F401  fixtures, for test_ranks*.py
