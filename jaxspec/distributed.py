"""Several processes, one run: each runs the same command on the same flags and files, on its own devices, and the first one prints and
writes. `jax.distributed` brings them together.
"""

import hashlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxspec.errors import InputError

T = TypeVar("T")

HEARTBEAT_S = 60  # a process that is silent for so long is dead, and the others end
JOIN_S = 120  # the processes must find one another within it
PREFIX = "--distributed"
# How Gloo, NCCL and JAX's coordination service say that a process is gone.
LOST = ("gloo", "connection closed", "connection reset", "nccl", "coordination service", "heartbeat", "unavailable")

_process: tuple[int, int] | None = None  # this process's number and how many there are, once they have met


def add_flags(add: Callable[..., Any]) -> None:
    """The flags of `start`, by a parser's `add_argument`."""
    add(
        "--distributed",
        action="store_true",
        help="run as one of several processes; SLURM, Open MPI, Kubernetes and TPU pods are recognised",
    )
    add("--coordinator-address", metavar="HOST:PORT", help="where process 0 waits (default: as found, see docs)")
    add("--num-processes", type=int, metavar="N", help="how many there are (default: as found)")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0 on (default: as found)")


def start(args: Namespace) -> None:
    """With --distributed: meet the other processes. Call it before JAX is used, and `agree` as soon as the input is read.

    What a flag does not say comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then from SLURM, Open MPI,
    Kubernetes or a TPU pod as JAX finds them.

    Raises:
        InputError: something is missing or wrong, or the others don't come.
    """
    global _process
    given = {name: getattr(args, name) for name in ("coordinator_address", "num_processes", "process_id")}
    if not args.distributed:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"--{name.replace('_', '-')} goes with {PREFIX}; add that flag")
        return
    said = {name: f"--{name.replace('_', '-')}" for name in given}  # where each comes from
    for name in ("num_processes", "process_id"):
        variable = f"JAX_{name.upper()}"
        if given[name] is None and variable in os.environ:
            given[name], said[name] = _whole_number(variable, os.environ[variable]), variable
    number, total = given["process_id"], given["num_processes"]
    if total is not None and total < 1:
        raise InputError(f"{said['num_processes']} is {total}; at least 1 is wanted")
    if number is not None and (number < 0 or (total is not None and number >= total)):
        most = "the number of processes less one" if total is None else total - 1
        raise InputError(f"{said['process_id']} is {number}; it counts from 0 to {most}")
    address = given["coordinator_address"] or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and not address.rpartition(":")[2].isdigit():
        named = said["coordinator_address"] if given["coordinator_address"] else "JAX_COORDINATOR_ADDRESS"
        raise InputError(f"{named} is {address!r}; HOST:PORT is wanted")
    import jax

    _keep_stdout()
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and nothing here asks it
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=JOIN_S,
        )
    except (ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"{PREFIX}: the processes did not meet: {reason} Give --coordinator-address, --num-processes and --process-id, or start them "
            "with SLURM or Open MPI"
        ) from error
    _process = jax.process_index(), jax.process_count()


def running() -> bool:
    """Whether there are other processes."""
    return _process is not None and _process[1] > 1


def first() -> bool:
    """Whether this process prints and writes."""
    return _process is None or _process[0] == 0


def label() -> str:
    """What stands behind the command's name in a line on stderr: which process it is, if there are several."""
    return f" (process {_process[0]} of {_process[1]})" if running() and _process is not None else ""


def own_folder(name: str) -> str:
    """A folder of this process's own in the folder `name`, for files that every process would call the same; alone the folder itself."""
    return os.path.join(name, f"process-{_process[0]}") if running() and _process is not None else name


def lost(error: BaseException) -> bool:
    """Whether this is how an exchange fails when the process at its other end is gone."""
    return running() and any(sign in str(error).lower() for sign in LOST)


def agree(args: Namespace, **read: Any) -> None:
    """Raises InputError, in every process, where flags or what they `read` (by name: anything with a `repr` of its content) differ."""
    if not running():
        return
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name != "process_id"}
    _compare({**flags, **read})


def same(value: Any) -> Any:
    """Process 0's value, an array or a number, in every process: for what is drawn or measured and decides what is run."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(value)


def by_first(act: Callable[[], T]) -> T | None:
    """What `act` gives in process 0, while the others wait for it; None in those."""
    done = act() if first() else None
    if running():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("jaxspec")
    return done


def _keep_stdout() -> None:
    """What libraries write to stdout themselves, as Gloo does, goes to stderr from here on: stdout is for answers."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(answers, "w", encoding="utf-8")


def _compare(values: Mapping[str, Any]) -> None:
    import numpy as np
    from jax.experimental import multihost_utils

    digests = [np.frombuffer(hashlib.sha256(repr(value).encode()).digest()[:8], np.uint32) for value in values.values()]
    found = np.asarray(multihost_utils.process_allgather(np.stack(digests)))  # [processes, values, 2]
    for number, name in enumerate(values):
        other = np.flatnonzero((found[:, number] != found[:1, number]).any(axis=-1))
        if other.size:
            raise InputError(f"{PREFIX}: {name} differs between processes 0 and {other[0]}; all must be started alike")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}; a whole number is wanted") from None
