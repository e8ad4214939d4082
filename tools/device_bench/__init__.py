"""The parts of `tools/bench_device.py`: kernels, whole cycles, and dflash's loop in torch, on the device that is here."""
