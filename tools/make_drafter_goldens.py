"""Make the drafter fixtures of tests/test_drafter_parity.py with the PyTorch originals.

Run in the reference environment (`make reference`), with a clone of github.com/deepseek-ai/DeepSpec, bare or not:

    python tools/make_drafter_goldens.py --deepspec CLONE [CASE ...]

tests/goldens/drafters/ then holds two tiny verifiers, `verifier` and `verifier_gemma`, and a directory a case: the checkpoint as its
peer's users get it (config.json, model.safetensors in bfloat16), outputs.npz (`sequence`, `features`, `ends` and the fields of
`drafter_goldens.common.Outputs`) and meta.json (peers and versions, seed, verifier, aux ids of the taps). References are computed in
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

import torch
import transformers
from drafter_goldens import by_deepspec, by_speculators, by_zlab, common
from loguru import logger


def main() -> None:
    """Make the cases named on the command line, or all."""
    names = [*by_speculators.CASES, *by_zlab.CASES, *by_deepspec.CASES]
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
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # argument names that transformers will rename
    logger.remove()  # speculators logs every load
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "drafters"
        work.mkdir()
        common.make_verifiers(work)
        makers = {name: partial(by_speculators.make, name, case) for name, case in by_speculators.CASES.items()}
        makers |= {name: partial(by_zlab.make, name, case) for name, case in by_zlab.CASES.items()}
        if args.deepspec is not None:
            commit = by_deepspec.unpack(args.deepspec, Path(scratch))
            makers |= {
                name: partial(by_deepspec.make, name, case, commit=commit) for name, case in by_deepspec.CASES.items()
            }
        for name in wanted:
            makers[name](directory=work / name)
        for made in work.iterdir():  # only after all went well
            shutil.rmtree(common.GOLDENS / made.name, ignore_errors=True)
            shutil.copytree(made, common.GOLDENS / made.name)


if __name__ == "__main__":
    main()
