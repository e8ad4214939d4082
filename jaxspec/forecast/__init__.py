"""What a model will need and how fast it can be on devices that need not be here: `jaxspec.plan`, and the gate of `tools/aot.py`."""
