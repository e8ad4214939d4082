"""Whether a drafter goes with a verifier, and with a number of drafts."""

from jaxspec.config import VerifierConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError


def check_verifier(config: DrafterConfig, num_layers: int | None, verifier: VerifierConfig, where: str) -> None:
    """Raises InputError where the drafter was made for a verifier of other sizes.

    `num_layers`: the layers L of the verifier that it was made for, where it says so. `where` names the drafter.
    """
    if config.width != verifier.width:
        raise InputError(
            f"{where}: this drafter is for a verifier of width {config.width}; this verifier's is {verifier.width}"
        )
    if config.vocab_size != verifier.vocab_size:
        raise InputError(
            f"{where}: this drafter is for a verifier of {config.vocab_size} tokens; this verifier has {verifier.vocab_size}"
        )
    if num_layers not in (None, verifier.num_layers):
        raise InputError(
            f"{where}: this drafter is for a verifier of {num_layers} layers; this verifier has {verifier.num_layers}"
        )
    if config.taps[-1] > verifier.num_layers:
        raise InputError(
            f"{where}: this drafter taps aux layer {config.taps[-1]}; this verifier's go up to {verifier.num_layers}, its "
            "number of layers"
        )


def check_drafts(config: DrafterConfig, drafts: int) -> None:
    """Raises InputError for more drafts a cycle, K, than the drafter can make."""
    if drafts < 1:
        raise InputError(f"num_speculative_tokens is {drafts}; at least 1 is wanted")
    most, block = config.max_drafts, config.block
    if most is not None and block is not None and drafts > most:
        how = "every slot drafts" if block.sample_from_anchor else "the anchor's slot drafts nothing"
        raise InputError(
            f"num_speculative_tokens is {drafts}, but this {config.method} drafter makes at most {most} a cycle: its block has "
            f"{block.size} slots and {how}"
        )
