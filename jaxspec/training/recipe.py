"""A training run as data: the YAML recipe, one frozen dataclass a section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxspec.drafters.config import MarkovKind, Method
from jaxspec.errors import InputError
from jaxspec.training.settings import Range, read_settings

Count = Annotated[int, Range(low=0)]
Positive = Annotated[int, Range(low=1)]
PositiveNumber = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(low=0)]
Share = Annotated[float, Range(low=0, high=1)]
Dtype = Literal["float32", "bfloat16"]
LossName = Literal["kl", "reverse_kl", "js", "ce", "tv", "nla", "lk_hybrid"]


@dataclass(frozen=True)
class VerifierRecipe:
    """The frozen model.

    `model`: directory, hub id or .gguf file; "demo" for the demo model. `name`: how the finished drafter names it; null: as `model`.
    `dtype` null: float32 on CPUs, else the checkpoint's.
    """

    model: str = "demo"
    name: str | None = None
    dtype: Dtype | None = None


@dataclass(frozen=True)
class MarkovRecipe:
    """DSpark's sequential head; rank 0 for none."""

    kind: MarkovKind = "vanilla"
    rank: Count = 256


@dataclass(frozen=True)
class ConfidenceRecipe:
    """DSpark's confidence head. `with_markov` null: where there is a sequential head."""

    enabled: bool = True
    with_markov: bool | None = None


@dataclass(frozen=True)
class EagleRecipe:
    """As `EagleConfig`; null: the default, or what the checkpoint of `init_from` has."""

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


@dataclass(frozen=True)
class DrafterRecipe:
    """The drafter: new, or begun from the checkpoint `init_from`. What is null follows from that checkpoint, else from the verifier.

    Fields:
        taps: aux ids; null: 2, L // 2, L - 3.
        draft_vocab_size: the most frequent answer tokens; null: the verifier's whole vocabulary.
        block_size, sample_from_anchor: of DFlash and DSpark.
        sliding_window: 0 for none. full_layers: layers that have none all the same.
        window_both_ways: the block's tokens see one another both ways in sliding layers too (DFlash, DSpark).
        mask_token: null: the tokenizer's, else its first unused id, else its padding or end token.
        init_from: directory or hub id of a drafter of this method, or of the one it extends (EAGLE-3 for P-EAGLE, DFlash for DSpark).
        train: "heads" leaves all but the sequential and confidence heads, and the output head if that is trained, as they are.
        train_embed, train_head: whether embedding and output head are learned; null: the embedding of P-EAGLE only.
    """

    method: Method
    layers: Positive | None = None
    taps: tuple[Count, ...] | None = None
    draft_vocab_size: Positive | None = None
    block_size: Annotated[int, Range(low=2)] | None = None
    sample_from_anchor: bool | None = None
    markov: MarkovRecipe | None = None
    confidence: ConfidenceRecipe | None = None
    eagle: EagleRecipe = EagleRecipe()
    heads: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    mlp_width: Positive | None = None
    qk_norm: bool | None = None
    sliding_window: Count | None = None
    full_layers: tuple[Count, ...] | None = None
    window_both_ways: bool | None = None
    mask_token: Count | None = None
    init_from: str | None = None
    train: Literal["all", "heads"] = "all"
    train_embed: bool | None = None
    train_head: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in ("dflash", "dspark"):
            for name in ("block_size", "sample_from_anchor", "window_both_ways"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name} goes with dflash and dspark, not with {self.method}")
        if self.method != "dspark":
            for name in ("markov", "confidence"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name} goes with dspark, not with {self.method}")
        if self.method not in ("eagle3", "peagle") and self.eagle != EagleRecipe():
            raise InputError(f"eagle goes with eagle3 and peagle, not with {self.method}")
        if self.eagle.norm_before_fc and self.eagle.fc_norm:
            raise InputError("eagle.norm_before_fc and fc_norm are both true; only one of them can be")


@dataclass(frozen=True)
class AnswersRecipe:
    """Answers that the verifier itself gives to `data.questions`, by --write-answers, into the JSON lines file `output`."""

    output: str
    max_new_tokens: Positive = 512
    temperature: NotNegative = 0.0
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    top_k: Count = 0
    seed: Count = 0
    rows: Positive = 32
    chat: bool = True
    system: str | None = None


@dataclass(frozen=True)
class VocabularyRecipe:
    """What the tokens of a reduced draft vocabulary are counted in.

    Fields:
        answers: how often each answer token of the training documents counts.
        texts: further sources, as `DataRecipe.train`; how often each token of all that their lines say counts.
    """

    answers: Count = 1
    texts: Mapping[str, Positive] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.answers and not self.texts:
            raise InputError("answers is 0 and there are no texts; something to count is wanted")


@dataclass(frozen=True)
class DataRecipe:
    """What the drafter learns from.

    Fields:
        train, validation: JSON lines files, or "hub:OWNER/NAME[[:CONFIG]:SPLIT]". Without `validation`, `validation_share` of the
            training documents is held out; 0 for none.
        max_tokens: longest document, and so the shortest row; longer ones are cut or skipped, as `too_long` says.
        rows, row_tokens: shape of a micro-batch; row_tokens null: max_tokens. pack: several documents a row.
        min_answer: documents with fewer answer tokens are skipped; null: 1.
        thinking: as the model's thinking mode of the samples; null: as each shows it.
        limit: at most so many lines.
        vocabulary: see `VocabularyRecipe`.
        token_counts: file of token frequencies, instead of counting as `vocabulary` says.
        questions, answers: see `AnswersRecipe`.
        features: directory of features written by --write-features; null: the verifier runs within the step.
        features_dtype: what they are written in.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    validation_share: Annotated[float, Range(low=0, high=0.5)] = 0.05
    max_tokens: Annotated[int, Range(low=2)] = 2048
    rows: Positive = 1
    row_tokens: Positive | None = None
    pack: bool = True
    too_long: Literal["truncate", "skip"] = "truncate"
    min_answer: Positive | None = None
    thinking: bool | None = None
    limit: Positive | None = None
    vocabulary: VocabularyRecipe = VocabularyRecipe()
    token_counts: str | None = None
    questions: tuple[str, ...] = ()
    answers: AnswersRecipe | None = None
    features: str | None = None
    features_dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if not self.train:
            raise InputError("train is empty; at least one source is wanted")
        if self.row_tokens is not None and self.row_tokens < self.max_tokens:
            raise InputError(f"row_tokens is {self.row_tokens}, less than max_tokens {self.max_tokens}")

    @property
    def length(self) -> int:
        """T, tokens a row."""
        return self.row_tokens or self.max_tokens


@dataclass(frozen=True)
class ObjectiveRecipe:
    """The loss.

    Fields:
        losses: weight of each loss; null: kl, and ce for DFlash, 0.1 ce + 0.9 tv for DSpark.
        labels: what a slot learns: the verifier's distribution, or the data's token (DeepSpec).
        decay: weight of a block's slots: fixed exp(-k / gamma), D-PACE with alpha, or none. null: dpace for DFlash, fixed for DSpark.
        anchors: blocks or chains a row. confidence_weight: of DSpark's confidence term.
        ttt_steps, step_decay: EAGLE-3's training-time test.
        depths, down_sample_ratio, down_sample_min: P-EAGLE's conditional drop.
        attention_chunk, logits_chunk: blocks (DFlash, DSpark) or pairs whose scores, and whose logits, are there at a time; null: as
            many as fill 8 MB on CPUs (attention on one: 64 slots), 256 MB elsewhere.
    """

    losses: Mapping[LossName, NotNegative] | None = None
    labels: Literal["verifier", "data"] = "verifier"
    decay: Literal["fixed", "dpace", "none"] | None = None
    gamma: PositiveNumber = 4.0
    alpha: Share = 0.5
    anchors: Positive = 512
    confidence_weight: NotNegative = 1.0
    ttt_steps: Positive = 3
    step_decay: Annotated[float, Range(above=0, high=1)] = 1.0
    depths: Annotated[int, Range(low=2)] = 8
    down_sample_ratio: Annotated[float, Range(above=0, high=1)] = 0.7
    down_sample_min: Share = 0.2
    attention_chunk: Positive | None = None
    logits_chunk: Positive | None = None

    def __post_init__(self) -> None:
        if self.losses is not None and not sum(self.losses.values()):
            raise InputError("losses have no weight; at least one above 0 is wanted")


@dataclass(frozen=True)
class OptimizerRecipe:
    """How the weights move.

    Fields:
        name: muon moves the hidden matrices, AdamW the rest at `adam_lr` (null: `lr`).
        lr, schedule, warmup: highest rate; its course after the warm-up of `warmup` steps, or of that share of all steps if below 1.
        floor: the rate at the end, as a share of `lr`.
        weight_decay: AdamW's; `muon_weight_decay`, `momentum`: Muon's.
        clip: largest global norm of the gradients; null: no limit.
        accumulation: micro-batches a step.
        steps or epochs: the length of the run; one of them.
        compute: dtype of the step; the weights themselves are float32.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: PositiveNumber = 6e-4
    adam_lr: PositiveNumber | None = None
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    warmup: NotNegative = 0.04
    floor: Share = 0.0
    weight_decay: NotNegative = 0.01
    muon_weight_decay: NotNegative = 0.1
    momentum: Share = 0.95
    betas: tuple[Share, ...] = (0.9, 0.999)
    clip: PositiveNumber | None = 1.0
    accumulation: Positive = 1
    steps: Positive | None = None
    epochs: Positive | None = None
    compute: Dtype | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InputError("steps and epochs: exactly one of them is wanted")
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise InputError(f"betas is {list(self.betas)}; two numbers below 1 are wanted")
        if self.warmup >= 1 and not self.warmup.is_integer():
            raise InputError(f"warmup is {self.warmup}; a share below 1 or a whole number of steps is wanted")


@dataclass(frozen=True)
class ExportRecipe:
    """The drafter that a finished run writes. `drop`: as --drop of jaxspec.convert."""

    format: Literal["speculators", "z-lab", "deepspec", "eagle3", "orbax"] = "speculators"
    dtype: Dtype = "bfloat16"
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRecipe:
    """The run itself. Every `*_every` counts steps; 0 for never (but at the end).

    Fields:
        output: directory of checkpoints, logs and the finished drafter.
        keep: latest checkpoints that are kept. keep_best: also the one of the longest acceptance on the validation documents.
        validation_documents: at most so many of them are walked; null: all.
    """

    output: str
    seed: Annotated[int, Range(low=0, high=2**32 - 1)] = 0
    checkpoint_every: Count = 500
    validate_every: Count = 500
    log_every: Positive = 10
    keep: Positive = 2
    keep_best: bool = True
    validation_documents: Positive | None = None
    export: ExportRecipe = ExportRecipe()


@dataclass(frozen=True)
class MeshRecipe:
    """Devices along each axis: rows are split over `data`, the verifier's matrices over `tensor`, its experts over `expert`."""

    data: Positive = 1
    tensor: Positive = 1
    expert: Positive = 1


@dataclass(frozen=True)
class Recipe:
    """A whole run. `mesh` null: all devices along `data`."""

    drafter: DrafterRecipe
    data: DataRecipe
    optimizer: OptimizerRecipe
    run: RunRecipe
    verifier: VerifierRecipe = VerifierRecipe()
    objective: ObjectiveRecipe = ObjectiveRecipe()
    mesh: MeshRecipe | None = None


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `--set` overrides; see `read_settings` for what it refuses."""
    return read_settings(Recipe, path, overrides)
