"""Programs compiled for GPUs that this machine does not have, by `tools/aot.py`."""
