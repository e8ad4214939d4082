"""What speculators' own code computes for the fixtures: its training forwards, and drafting as vLLM does it on its layers."""

from unittest import mock

import torch
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import core as dspark_core
from speculators.models.peagle import core as peagle_core
from transformers import DynamicCache

from drafter_goldens import common
from drafter_goldens.common import BLOCK, DRAFTS, ENDS, LENGTH, Inputs, Outputs


def to_verifier(model: SpeculatorModel, ids: torch.Tensor) -> torch.Tensor:
    return ids if model.d2t is None else ids + model.d2t[ids]


def eagle3(model: SpeculatorModel, inputs: Inputs) -> Outputs:
    """The training forward's first step, and vLLM's loop: the last row, then single rows on their own features."""
    steps = training_steps(model, inputs.features, inputs.next_tokens, 1)
    chains = [chain(model, inputs.features[:, :end], inputs.next_tokens[:, :end]) for end in ENDS]
    for end, (logits, tokens) in zip(ENDS, chains, strict=True):
        if model.uses_sliding_window_attn:
            break  # the training mask's window doesn't move with the step, vLLM's does
        padding = torch.zeros(1, DRAFTS - 1, inputs.features.shape[2])
        features = torch.cat([inputs.features[:, :end], padding], dim=1)
        forced = torch.cat([inputs.next_tokens[:, :end], tokens[None, :-1]], dim=1)
        trained = training_steps(model, features, forced, DRAFTS)[:, end - 1]
        torch.testing.assert_close(trained, logits, rtol=0, atol=2e-5)
    return Outputs(steps[0][None], torch.stack([c[0] for c in chains]), torch.stack([c[1] for c in chains]))


def training_steps(model: SpeculatorModel, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits [steps, T, Vd] of the training forward: every step feeds the true tokens and the last step's features."""
    logits: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    model(features, tokens, torch.zeros_like(tokens), ttt_steps=steps)
    handle.remove()
    return torch.stack(logits)


def chain(model: SpeculatorModel, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [K, Vd] and greedy tokens [K] behind the rows given, as vLLM drafts them (SPEC 1d)."""
    hidden = features
    if model.input_norm is not None:
        hidden = model.input_norm(hidden)
    if model.fc_norm is not None:
        parts = hidden.chunk(len(model.fc_norm), dim=-1)
        hidden = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    hidden = model.fc(hidden)
    cache = DynamicCache()
    logits, chosen = [], []
    positions = torch.arange(tokens.shape[1])
    for _ in range(DRAFTS):
        hidden = torch.cat([model.embed_tokens(tokens), hidden], dim=-1)
        rope = model.rotary_emb(hidden, positions[None])
        keys = torch.arange(int(positions[-1]) + 1)
        seen = keys[None] <= positions[:, None]
        for index, layer in enumerate(model.layers):
            window = model.sliding_window if index in model.sliding_window_indices else len(keys)
            mask = torch.zeros(len(positions), len(keys))
            mask[~(seen & (keys[None] > positions[:, None] - window))] = float("-inf")
            hidden = layer(
                hidden,
                attention_mask=mask[None, None],
                position_ids=positions[None],
                past_key_values=cache,
                cache_position=positions,
                position_embeddings=rope,
            )
        hidden = hidden[:, -1:]
        normed = model.norm(hidden)
        logits.append(model.lm_head(normed)[0, 0])
        hidden = normed if model.config.norm_output else hidden
        tokens = to_verifier(model, logits[-1].argmax())[None, None]
        chosen.append(tokens[0, 0])
        positions = positions[-1:] + 1
    return torch.stack(logits), torch.stack(chosen)


def peagle(model: SpeculatorModel, inputs: Inputs) -> Outputs:
    """The masked training forward on chosen (anchor, depth) pairs: every position at depth 0, the anchors at all depths."""
    anchors = torch.tensor(ENDS) - 1
    anchor = torch.cat([torch.arange(LENGTH), *(anchors for _ in range(1, DRAFTS))])
    depth = torch.cat([torch.zeros(LENGTH, dtype=torch.long), torch.arange(1, DRAFTS).repeat_interleave(len(anchors))])
    capture = Capture()
    with (
        mock.patch.object(peagle_core, "generate_cod_sample_indices", lambda **_: (anchor, depth)),
        mock.patch.object(peagle_core, "compute_metrics", capture),
    ):
        model(
            inputs.features,
            inputs.next_tokens,
            torch.zeros_like(inputs.next_tokens),
            verifier_last_hidden_states=inputs.features[..., : common.WIDTH],
        )
    logits = capture.kwargs["logits"][0]
    later = logits[LENGTH:].reshape(DRAFTS - 1, len(anchors), -1)
    drafts = torch.cat([logits[anchors][None], later]).swapaxes(0, 1)
    return Outputs(logits[None, :LENGTH], drafts, to_verifier(model, drafts.argmax(-1)))


def block(model: SpeculatorModel, inputs: Inputs) -> Outputs:
    """DFlash's and DSpark's training forward with ENDS as anchors; DSpark's Markov head once more on its own drafts."""
    core = dspark_core if isinstance(model, dspark_core.DSparkDraftModel) else dflash_core
    anchors = torch.tensor(ENDS)
    capture, hidden = Capture(), []
    handle = model.norm.register_forward_hook(lambda _, __, output: hidden.append(output))
    loss: dict[str, object] = {"loss_config": resolve_loss_config("kl_div", "eager")}
    if core is dspark_core:
        loss["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    tokens = inputs.sequence[:, :LENGTH]
    with (
        mock.patch.object(dflash_core, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors))),
        mock.patch.object(core, "compute_metrics", capture),
    ):
        model(
            inputs.features,
            tokens,
            torch.ones_like(tokens),
            inputs.features[..., : common.WIDTH],
            torch.zeros_like(tokens),
            max_anchors=len(ENDS),
            **loss,
        )
    handle.remove()
    hidden = hidden[0].reshape(len(ENDS), BLOCK, -1)
    logits = capture.args[0].reshape(len(ENDS), BLOCK, -1)
    first = 0 if model.config.sample_from_anchor else 1
    if core is dflash_core:
        drafts = logits[:, first:]
        return Outputs(logits, drafts, to_verifier(model, drafts.argmax(-1)))
    confidence = capture.args[2]
    confidence = None if confidence is None else confidence.reshape(len(ENDS), BLOCK)
    drafts, tokens, draft_confidence = sequential(model, hidden, tokens[0, anchors], first)
    return Outputs(logits, drafts, tokens, confidence, draft_confidence)


def sequential(
    model: SpeculatorModel, hidden: torch.Tensor, anchor: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Greedy drafts left to right: speculators has no loop of its own, so its block forward runs again after every choice."""
    base = model.lm_head(hidden)
    previous = anchor[:, None].repeat(1, BLOCK)
    logits = base
    for slot in range(first, BLOCK):
        if model.markov_head is not None:
            logits = base + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        if slot + 1 < BLOCK:
            previous[:, slot + 1] = to_verifier(model, logits[:, slot].argmax(-1))
    confidence = None
    if model.confidence_head is not None:
        seen = hidden
        if model.config.confidence_head_with_markov:
            seen = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
        confidence = model.confidence_head(seen)[:, first:]
    return logits[:, first:], to_verifier(model, logits[:, first:].argmax(-1)), confidence


class Capture:
    """Stands in for a compute_metrics, and keeps what it was called with."""

    def __call__(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, dict[str, object]]:
        self.args, self.kwargs = args, kwargs
        return torch.zeros(()), {}
