"""From a drafter's config to its module."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.drafters.config import DrafterConfig
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.peagle import PEagle


def build_drafter(
    config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
) -> Eagle3 | PEagle | DFlash | DSpark:
    """The drafter that the config describes, with random weights; wrap in `nnx.eval_shape` to allocate none."""
    match config.method:
        case "eagle3":
            return Eagle3(config, rngs=rngs, dtype=dtype)
        case "peagle":
            return PEagle(config, rngs=rngs, dtype=dtype)
        case "dflash":
            return DFlash(config, rngs=rngs, dtype=dtype)
        case "dspark":
            return DSpark(config, rngs=rngs, dtype=dtype)
