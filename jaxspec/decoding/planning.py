"""From what the user asked and what the drafter is to what a compiled cycle does."""

from jaxspec.checkpoint.drafters.checks import check_drafts
from jaxspec.decoding.accept import Rule
from jaxspec.decoding.cycle import Plan, verify_widths
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError

DEFAULT_DRAFTS = 5  # for drafters whose checkpoint recommends no number and sets no bound


def make_plan(asked: SpeculativeConfig, drafter: DrafterConfig) -> Plan:
    """The plan, without the measured cost curve of `enable_adaptive_verification`; raises InputError where the drafter cannot do what
    was asked.
    """
    method = "peagle" if asked.method == "eagle3" and asked.parallel_drafting else asked.method
    if method is not None and method != drafter.method:
        raise InputError(f"method is {asked.method}, but the drafter is a {drafter.method} checkpoint")
    if asked.parallel_drafting and drafter.method == "eagle3":
        raise InputError("parallel_drafting is true, but an EAGLE-3 drafter without a mask token drafts one by one")
    drafts = asked.num_speculative_tokens
    if drafts is None:
        drafts = drafter.speculative_tokens or drafter.max_drafts or DEFAULT_DRAFTS
    check_drafts(drafter, drafts)
    has_confidence = drafter.block is not None and drafter.block.confidence is not None
    cuts = asked.confidence_threshold > 0 or asked.enable_adaptive_verification
    if cuts and not has_confidence:
        name = "confidence_threshold" if asked.confidence_threshold > 0 else "enable_adaptive_verification"
        raise InputError(f"{name} needs a drafter with a confidence head; this {drafter.method} drafter has none")
    rule = Rule(asked.rejection_sample_method)
    return Plan(
        drafts=drafts,
        sample_drafts=asked.draft_sample_method == "probabilistic",
        rule=rule,
        synthetic_rates=asked.conditional_rates(drafts) if rule is Rule.SYNTHETIC else (),
        confidence_threshold=asked.confidence_threshold,
        widths=tuple(verify_widths(drafts, cuts)),
    )
