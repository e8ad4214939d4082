"""Make the fixtures of tests/test_losses.py and tests/test_training_parity.py with the PyTorch originals.

Run in the reference environment (`make reference`), with a clone of github.com/deepseek-ai/DeepSpec, bare or not:

    python tools/make_training_goldens.py --deepspec CLONE [CASE ...]

tests/goldens/training/ then holds losses.npz (`training_goldens.losses`) and two files a case, CASE.safetensors and CASE.json
(`training_goldens.common.write`): a batch, the verifier's features, every random choice, the loss and its terms, the metrics, and the
gradient of every parameter that the peer trains. Drafters and verifiers are those of tests/goldens/drafters. Everything is computed in
float32 on the CPU; a second run writes the same bytes.
"""

import argparse
import os
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs the hub: make sure that nothing asks it

import numpy as np
import torch
import transformers
from drafter_goldens.by_deepspec import unpack
from loguru import logger
from training_goldens import by_deepspec, by_speculators, common, losses

LOSSES = "losses"


def main() -> None:
    """Make the cases named on the command line, or all."""
    names = [LOSSES, *by_speculators.CASES, *by_deepspec.CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(names)}; all by default")
    parser.add_argument("--deepspec", type=Path, metavar="CLONE", help="needed for the deepspec cases")
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(names))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(names)}")
    wanted = args.cases or names
    if args.deepspec is None and set(wanted) & set(by_deepspec.CASES):
        parser.error("--deepspec is needed for the deepspec cases")
    torch.set_num_threads(1)  # one order of summation
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # argument names that transformers will rename
    logger.remove()  # speculators logs every load
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "training"
        work.mkdir()
        makers = {LOSSES: lambda directory: np.savez_compressed(directory / "losses.npz", **losses.make(seed=7))}
        makers |= {name: partial(by_speculators.make, name, case) for name, case in by_speculators.CASES.items()}
        if args.deepspec is not None:
            commit = unpack(args.deepspec, Path(scratch))
            makers |= {
                name: partial(by_deepspec.make, name, case, commit=commit) for name, case in by_deepspec.CASES.items()
            }
        for name in wanted:
            makers[name](directory=work)
        common.GOLDENS.mkdir(exist_ok=True)
        for made in work.iterdir():  # only after all went well
            shutil.copyfile(made, common.GOLDENS / made.name)


if __name__ == "__main__":
    main()
