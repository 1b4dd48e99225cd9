"""Several processes, once they have met (`meeting.py`): they all run the same programs in the same order, and an error of one of them is an error of all.

A process whose reading failed goes on with empty buffers, so that nobody waits for it in an exchange. With each step
goes a vote, a number of each device, whose largest every process sees a few steps later, all at the same step; then all
of them stop.
"""

# pyright: reportInvalidTypeForm=false
# jax.Device is a variable to pyright.

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from weightbeam.pipelines.terminal.errors import Failed, Refused

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

LAG = 2  # steps between a vote and the look at it: nobody waits for it then
WORDS = 4096  # bytes of an error that the other processes are told


@functools.cache
def _largest(devices: tuple[jax.Device, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """How votes lie on the devices, and the program that tells every process the largest."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices, dtype=object), ("device",))
    return NamedSharding(mesh, PartitionSpec("device")), jax.jit(
        lambda votes: votes.max(), out_shardings=NamedSharding(mesh, PartitionSpec())
    )


class AgreedError(Exception):
    """An error that all processes have heard of at the same exchange: none has begun one that others never begin."""

    def __init__(self, error: Exception):
        self.error = error  # what this process raises


class Agreement:
    """The votes of a load. With one process there is nothing to agree on: errors are raised at once.

    Args:
      go_on: is called before a vote, and raises where there is no use in it.

    Raises:
      Refused: there are several, and they can't have met.
    """

    def __init__(self, go_on: Callable[[], None]) -> None:
        import jax

        self._go_on = go_on
        self.alone = jax.process_count() == 1
        self.error: Exception | None = None
        self._votes: collections.deque[jax.Array] = collections.deque()
        if not self.alone:
            if not jax.distributed.is_initialized():
                raise Refused(
                    f"JAX has {jax.process_count()} processes; call jax.distributed.initialize() in each first, so that they can agree on what they load"
                )
            self._split, self._largest = _largest(tuple(jax.devices()))

    def fail(self, error: Exception) -> None:
        """Notes the error of a step of this process."""
        if self.alone:
            raise error
        self.error = self.error or error

    def vote(self) -> None:
        """Says how a step went, and looks at an earlier one.

        Raises:
          AgreedError: it failed in a process: there with the error itself, in all others with a Failed that says in
            which, and why.
        """
        if self.alone:
            return
        import jax

        self._go_on()
        mine = [device for device in jax.devices() if device.process_index == jax.process_index()]
        shares = jax.device_put([np.array([self.error is not None], np.int32)] * len(mine), mine)
        votes = jax.make_array_from_single_device_arrays((jax.device_count(),), self._split, shares)
        self._votes.append(self._largest(votes))
        if len(self._votes) > LAG:
            self._look()

    def settle(self) -> None:
        """Looks at all votes that are left."""
        while self._votes:
            self._look()

    def _look(self) -> None:
        vote = self._votes.popleft()
        if int(np.asarray(vote.addressable_data(0))):
            raise AgreedError(self._shared_error())

    def _shared_error(self) -> Exception:
        """The error, told by the process that has it to all others."""
        import jax
        from jax.experimental import multihost_utils

        words = np.zeros(WORDS, np.uint8)
        if self.error is not None:
            text = str(self.error).encode()[:WORDS]
            words[: len(text)] = np.frombuffer(text, np.uint8)
            words[0] = words[0] or ord("?")
        everyone = np.asarray(multihost_utils.process_allgather(words))
        if self.error is not None:
            return self.error
        failed = [process for process in range(jax.process_count()) if everyone[process].any()]
        message = bytes(everyone[failed[0]]).rstrip(b"\0").decode(errors="replace")
        return Failed(f"process {failed[0]} of {jax.process_count()} failed, so nothing was loaded: {message}")
