"""The verifier and the drafters of an evaluation, loaded once, and engines on them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec import compilation_cache
from jaxspec.checkpoint.drafters.load import LoadedDrafter, load_drafter
from jaxspec.checkpoint.load import LoadedVerifier, load_verifier
from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.kernels import check_kernels
from jaxspec.decoding.planning import make_plan
from jaxspec.decoding.profile import measure_steps_per_s
from jaxspec.decoding.programs import power_of_two
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.drafters.base import Drafter
from jaxspec.errors import InputError
from jaxspec.sharding import mesh_of
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec_kernels.implementation import Implementation

OnCompile = Callable[[str | None], None]


@dataclass(frozen=True)
class Models:
    """What an evaluation runs.

    Fields:
        verifier: with its weights.
        config: the verifier's, its longest sequence cut to the speculative config's max_model_len.
        tokenizer: None where the model has none.
        drafters: with their weights, in the order given, each under the name it was given by.
        load_s: seconds that loading took.
        kernels: the kernels' implementation; None takes the platform's.
        mesh: the devices that the weights lie on; None for one.
    """

    verifier: LoadedVerifier
    config: VerifierConfig
    tokenizer: Tokenizer | None
    drafters: tuple[tuple[str, LoadedDrafter], ...]
    load_s: float
    kernels: Implementation | None = None
    mesh: Mesh | None = None

    def engine(
        self,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
        *,
        max_batch_size: int,
        on_compile: OnCompile | None = None,
    ) -> Engine:
        """An engine on the verifier, plain without a drafter; weights are shared, not copied."""
        return Engine(
            self.config,
            self.verifier.module,
            drafter,
            plan,
            tokenizer=self.tokenizer,
            eos_ids=self.verifier.eos_ids,
            max_batch_size=max_batch_size,
            load_s=self.load_s,
            on_compile=on_compile,
            kernels=self.kernels,
            mesh=self.mesh,
        )


@dataclass(frozen=True)
class Run:
    """One way of decoding that takes part.

    Fields:
        name: for people; "plain", or the drafter's name and its K.
        drafter: as it was given; None for plain decoding.
        module: that drafter, or None.
        engine: ready to generate.
    """

    name: str
    drafter: str | None
    module: Drafter | None
    engine: Engine


def load_models(
    model: str | Path,
    drafters: Sequence[str],
    asked: SpeculativeConfig,
    dtype: DTypeLike | None,
    on_load: Callable[[int, int], None] | None = None,
    kernels: Implementation | None = None,
    mesh: str | None = None,
) -> Models:
    """Load everything.

    Raises:
        InputError: a model or drafter that cannot be loaded, a drafter of another verifier, kernels that do not run here, or a mesh that
            does not fit.
    """
    devices = mesh_of(mesh)
    check_kernels(kernels)
    compilation_cache.enable()
    start = time.perf_counter()
    verifier = load_verifier(model, dtype=dtype, progress=on_load, mesh=devices)
    config = verifier.config
    if asked.max_model_len is not None:
        config = replace(config, max_positions=min(config.max_positions, asked.max_model_len))
    loaded = []
    for drafter in drafters:
        try:
            loaded.append(
                (drafter, load_drafter(drafter, verifier=verifier, dtype=dtype, revision=asked.revision, mesh=devices))
            )
        except InputError as error:
            raise InputError(f"--drafter {drafter}: {error}") from error
    tokenizer = load_tokenizer(verifier.tokenizer_source)
    return Models(verifier, config, tokenizer, tuple(loaded), time.perf_counter() - start, kernels, devices)


def make_runs(
    models: Models,
    asked: SpeculativeConfig,
    drafts: Sequence[int],
    max_batch_size: int,
    on_compile: OnCompile | None = None,
) -> list[Run]:
    """Plain decoding, then each drafter with each K of `drafts` (none: the config's, or the checkpoint's own).

    Raises:
        InputError: a K that a drafter cannot do, or another wish that it cannot fulfil.
    """
    plans = []
    for (given, loaded), name in zip(models.drafters, _names([given for given, _ in models.drafters]), strict=True):
        for number in drafts or [asked.num_speculative_tokens]:
            try:
                plan = make_plan(replace(asked, num_speculative_tokens=number), loaded.config)
            except InputError as error:
                raise InputError(f"--drafter {given}: {error}") from error
            if asked.enable_adaptive_verification:
                curve = measure_steps_per_s(
                    models.config,
                    models.verifier.module,
                    loaded.module,
                    plan.drafts,
                    plan.widths,
                    power_of_two(max_batch_size),
                    models.kernels,
                    models.mesh,
                )
                plan = replace(plan, steps_per_s=curve)
            plans.append((given, f"{name} K={plan.drafts}", loaded.module, plan))
    runs = [Run("plain", None, None, models.engine(max_batch_size=max_batch_size, on_compile=on_compile))]
    for given, name, module, plan in plans:
        engine = models.engine(module, plan, max_batch_size=max_batch_size, on_compile=on_compile)
        runs.append(Run(name, given, module, engine))
    return runs


def _names(drafters: Sequence[str]) -> list[str]:
    """The last parts of their paths, or the whole where those are not distinct."""
    short = [Path(drafter).name or drafter for drafter in drafters]
    return short if len(set(short)) == len(short) else list(drafters)
