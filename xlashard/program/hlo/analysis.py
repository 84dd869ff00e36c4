"""Analysis of compiled modules: parsed once, with call sites and collectives on first use."""

from collections.abc import Mapping
from functools import cached_property

from xlashard.program.hlo.call_graph import CallSite, find_call_sites
from xlashard.program.hlo.collectives import Collective, find_collectives
from xlashard.program.hlo.module import HloText, split_modules


class HloModule(HloText):
    """One compiled module with all that reports and assertions derive from its text.

    Computations and metadata are members of `HloText`; trip counts are cached by `trip_count`.
    """

    @cached_property
    def call_sites(self) -> Mapping[str, CallSite]:
        """Return the call site of each computation that the entry reaches."""
        return find_call_sites(self)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives, in the order of the text.

        Raises:
            GroupTextError: The replica groups of a collective are invalid.
        """
        return tuple(find_collectives(self, self.call_sites))


def read_hlo(text: str) -> tuple[HloModule, ...]:
    """Parse the text of one or more modules; lines of an unknown form are skipped.

    Args:
        text: The text of `Compiled.as_text()`.
    """
    return tuple(map(HloModule.parse, split_modules(text)))


def read_collectives(text: str) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program.

    A start and its done are one collective. One that a fusion or an asynchronous computation
    wraps is found where the wrapper is called, and one in a computation with several callers is one
    collective that runs as often as the calls together. The fusion in which TPU's compiler hides a
    reduce-scatter, as an all-reduce of which each device keeps a slice, counts as reduce-scatter.

    Args:
        text: Optimised HLO of `Compiled.as_text()`.

    Returns:
        The collectives, in the order of the text.

    Raises:
        GroupTextError: The replica groups of a collective are invalid.

    Example:
        >>> found = read_collectives('''HloModule m, num_partitions=2
        ...
        ... ENTRY %main (p: f32[2,4]) -> f32[4,4] {
        ...   %p = f32[2,4]{1,0} parameter(0)
        ...   ROOT %g = f32[4,4]{1,0} all-gather(%p), replica_groups=[1,2]<=[2], dimensions={0}
        ... }''')
        >>> [(c.kind, c.operand_bytes, c.result_bytes, str(c.groups)) for c in found]
        [('all-gather', 32, 64, '1 group of 2 devices')]
    """
    return tuple(found for module in read_hlo(text) for found in module.collectives)
