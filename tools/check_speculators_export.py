"""Does speculators 0.9 load what jaxspec exports, with the same weights?

Every drafter under tests/goldens/drafters that the format can hold is exported in speculators' format; speculators loads each with
`SpeculatorModel.from_pretrained` and every tensor of its state is compared, bit for bit. Where jaxspec and speculators share no
environment, run the two halves on their own:

    python tools/check_speculators_export.py export FOLDER     # with jaxspec
    python tools/check_speculators_export.py load FOLDER       # with speculators and torch
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens" / "drafters"


def export(folder: Path) -> None:
    """One directory a drafter; those that speculators' format cannot hold are named with the reason."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from jaxspec.checkpoint.convert import convert
    from jaxspec.errors import InputError

    os.chdir(GOLDENS)  # the fixtures name their verifier by a relative path
    for source in sorted(path for path in GOLDENS.iterdir() if not path.name.startswith("verifier")):
        verifier = "verifier_gemma" if "gemma" in source.name else "verifier"
        # DeepSpec's fixtures have embeddings and heads of their own, which speculators' block drafters cannot
        drop = ("embed", "head") if source.name.startswith("deepspec_d") else ()
        try:
            convert(source, folder / source.name, "speculators", verifier=verifier, drop=drop)
        except InputError as error:
            print(f"{source.name}: cannot be held: {error}")


def load(folder: Path) -> int:
    """Loads every directory with speculators; returns how many differ."""
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModel

    os.chdir(GOLDENS)
    wrong, methods = 0, Counter()
    for directory in sorted(folder.iterdir()):
        model = SpeculatorModel.from_pretrained(str(directory))
        state = model.state_dict()
        written = load_file(directory / "model.safetensors")
        verifier = load_file(GOLDENS / model.config.speculators_config.verifier.name_or_path / "model.safetensors")
        lent = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
        problems = [f"{name} is not in the model" for name in written if name not in state]
        for name, value in state.items():
            if name.startswith("verifier_"):
                continue
            expected = written.get(name)
            if expected is None and name in lent:
                expected = verifier.get(lent[name], verifier["model.embed_tokens.weight"])
                if name == "lm_head.weight" and "t2d" in written:
                    expected = expected[written["t2d"]]
            if expected is None:
                problems.append(f"{name} was not written")
            elif not torch.equal(value.to(expected.dtype), expected):
                problems.append(f"{name} differs")
        wrong += bool(problems)
        methods[model.config.speculators_model_type] += 1
        print(f"{directory.name}: {type(model).__name__}, {len(state)} tensors: {'; '.join(problems) or 'equal'}")
    print(f"{sum(methods.values())} exports loaded ({dict(methods)}), {wrong} with differences")
    return wrong


def main() -> int:
    """Exit status 1 where an export does not load, or loads with other weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", nargs="?", choices=("both", "export", "load"), default="both")
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.folder is None and arguments.half != "both":
        parser.error(f"{arguments.half} needs a FOLDER")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        if arguments.half != "load":
            folder.mkdir(parents=True, exist_ok=True)
            export(folder)
        return int(arguments.half != "export" and load(folder) > 0)


if __name__ == "__main__":
    sys.exit(main())
