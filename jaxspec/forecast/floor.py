"""The least that a cycle can take: each weight and each key and value read once a pass, each product computed once, the bytes of each
collective sent once. Activations, launches and waiting come on top."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxspec.config import LayerConfig, MoeConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.forecast.devices import Device
from jaxspec.forecast.setup import Setup, Weight


@dataclass(frozen=True)
class Collective:
    """One kind of exchange in a cycle, along `tensor`, or along `tensor` and `expert`.

    Fields:
        kind: as XLA calls it.
        count: how many.
        nbytes: of the whole array in each.
        devices: that exchange.
    """

    kind: str
    count: int
    nbytes: int
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that one of the devices, in a ring, sends for all of them."""
        share = (self.devices - 1) / self.devices
        return self.count * self.nbytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Pass:
    """One pass through a model, on one device.

    Fields:
        name: of the part of the cycle.
        nbytes: read from the device's memory.
        flops: computed.
        collectives: what is exchanged.
    """

    name: str
    nbytes: float
    flops: float
    collectives: tuple[Collective, ...]

    def seconds(self, setup: Setup, device: Device) -> float:
        """The slower of reading and computing, and then the exchange."""
        here = max(self.nbytes / device.bandwidth, self.flops / device.flops[setup.dtype.name])
        sent = sum(one.sent for one in self.collectives)
        return here + (sent / device.link if sent else 0.0)


def verify(setup: Setup, batch: int, context: int, drafts: int) -> Pass:
    """The verifier over an anchor and `drafts` drafts of B rows that hold `context` tokens; 0 drafts is plain decoding."""
    config, block = setup.verifier, drafts + 1
    tokens = setup.rows(batch) * block
    table = {("per_layer_embed", "weight")} if config.tied else {("per_layer_embed", "weight"), ("embed", "weight")}
    read = [weight for weight in setup.verifier_weights if weight.path not in table]
    nbytes, flops = _weights(read, tokens, next((layer.moe for layer in config.layers if layer.moe), None))
    seen = _attention(setup, config.layers, batch, context, block, replicated=False)
    exchanged = _collectives(setup, config.layers, config.width, batch, block, block, config.vocab_size, False)
    if setup.tensor > 1 and config.per_layer_width:
        embedded = tokens * config.num_layers * config.per_layer_width * setup.dtype.itemsize
        exchanged = (*exchanged, Collective("all-reduce", 1, embedded, setup.tensor))
    return Pass("verify", nbytes + seen[0], flops + seen[1], exchanged)


def draft(setup: Setup, batch: int, context: int) -> tuple[Pass, ...]:
    """What the drafter does in a cycle, pass by pass."""
    config, k = setup.drafter, setup.plan.drafts
    assert config is not None
    if config.block is not None:
        return (_inject(setup, config, batch, k + 1), _drafting(setup, config, batch, context, config.block.size, k))
    if config.method == "peagle":
        return (_drafting(setup, config, batch, context, 2 * k, k, fused=k + 1),)
    one = _drafting(setup, config, batch, context, 1, 1)
    return (_drafting(setup, config, batch, context, k + 1, 1, fused=k + 1), *(one,) * (k - 1))


def _inject(setup: Setup, config: DrafterConfig, batch: int, block: int) -> Pass:
    read = [
        w for w in setup.drafter_weights if w.path[0] in ("fc", "hidden_norm") or w.path[-2] in ("k", "v", "k_norm")
    ]
    return Pass("inject", *_weights(read, setup.rows(batch) * block), ())


def _drafting(
    setup: Setup, config: DrafterConfig, batch: int, context: int, block: int, heads: int, fused: int = 0
) -> Pass:
    """Layers over `block` slots a row, the head over `heads` of them, features of `fused` rows projected."""
    rows, replicated = setup.rows(batch), setup.drafter_replicated
    layers = [w for w in setup.drafter_weights if w.path[0] in ("layers", "norm")]
    parts = [_weights(layers, rows * block)]
    if fused:
        parts.append(
            _weights([w for w in setup.drafter_weights if w.path[0] in ("fc", "fc_norms", "input_norm")], rows * fused)
        )
    head = next((w.nbytes for w in setup.drafter_weights if w.path == ("vocabulary", "head", "weight")), None)
    head = setup.head_bytes() if head is None else head
    parts.append((head, 2 * rows * heads * head / setup.dtype.itemsize))
    steps = [
        w for w in setup.drafter_weights if w.path[:2] in (("markov", "w2"), ("markov", "gate"), ("markov", "joint"))
    ]
    parts += [_weights(steps, rows)] * heads  # DSpark's sequential head, slot by slot
    parts.append(_attention(setup, config.layers, batch, context, block, replicated))
    exchanged = _collectives(
        setup, config.layers, config.width, batch, block, heads, config.draft_vocab_size, replicated
    )
    return Pass("draft", sum(part[0] for part in parts), sum(part[1] for part in parts), exchanged)


def _weights(weights: Iterable[Weight], tokens: int, moe: MoeConfig | None = None) -> tuple[float, float]:
    """Bytes and flops of `tokens` tokens through them. Experts: as many as tokens that choose independently and evenly would reach."""
    nbytes = flops = 0.0
    for weight in weights:
        reached = chosen = 1.0
        if weight.is_expert and moe is not None:
            chosen = moe.top_k / moe.experts
            reached = 1 - (1 - chosen) ** tokens
        nbytes += reached * weight.nbytes
        flops += 2 * tokens * chosen * weight.size if len(weight.axes) > 1 else 0
    return nbytes, flops


def _attention(
    setup: Setup, layers: tuple[LayerConfig, ...], batch: int, context: int, block: int, replicated: bool
) -> tuple[float, float]:
    """Bytes of the keys and values that a block of each row sees, and the flops of seeing them."""
    rows, devices = setup.rows(batch), 1 if replicated else setup.tensor
    nbytes = flops = 0.0
    for layer in layers:
        one = layer.attention
        seen = rows * (min(context, one.window or context) + block)
        nbytes += 2 * seen * one.kv_heads * one.head_dim * setup.dtype.itemsize / devices
        flops += 4 * seen * block * one.heads * one.head_dim / devices
    return nbytes, flops


def _collectives(
    setup: Setup,
    layers: tuple[LayerConfig, ...],
    width: int,
    batch: int,
    block: int,
    heads: int,
    vocab: int,
    replicated: bool,
) -> tuple[Collective, ...]:
    """Of one pass over `block` slots a row, by the rule that heads, widths, experts and vocabularies are split: the sums of the embedding,
    of each attention and each MLP, and the logits of `heads` slots put together."""
    if replicated or setup.devices == setup.sizes["data"]:
        return ()
    rows, size = setup.rows(batch), setup.dtype.itemsize
    experts = sum(layer.moe is not None for layer in layers)
    dense = sum(layer.mlp_width is not None for layer in layers)
    found = []
    if setup.tensor > 1:
        sums = 1 + len(layers) + dense
        found.append(Collective("all-reduce", sums, rows * block * width * size, setup.tensor))
        found.append(Collective("all-gather", 1, rows * heads * vocab * size, setup.tensor))
    if experts:  # summed in float32, along expert and tensor together
        both = setup.tensor * setup.sizes["expert"]
        found.append(Collective("all-reduce", experts, rows * block * width * 4, both))
    return tuple(found)
