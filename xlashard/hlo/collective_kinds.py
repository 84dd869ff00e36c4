"""Kinds of collectives, and how each of them moves data.

To add a kind, enter it here. The readers of HLO, the network models, reports, budgets and
assertions take it from this table. Only traffic of a new form needs formulas: its bytes here, its
time in `xlashard.predict.costs`: `network_model` (TPUs and what GPUs share) and `gpu.nccl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

type CollectiveKind = Literal[
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind.__value__)
"""Every kind of collective, in the order of summaries."""


@dataclass(frozen=True)
class CollectiveTraits:
    """Way in which a kind of collective moves data.

    Attributes:
        traffic: `ring` if values pass around all devices of a group, `exchange` if each device
            sends another part to each other, `broadcast` if each but the last forwards the same
            value once, `pairs` if the program lists senders and receivers in place of groups.
        rounds: Times that each part of the value passes around the group.
        reduces: Whether it computes on its way.
        gathers: Whether each device of a group receives the whole value, unchanged.
    """

    traffic: Literal["ring", "exchange", "broadcast", "pairs"]
    rounds: int = 1
    reduces: bool = False
    gathers: bool = False

    def sent_bytes(self, payload: float, size: int) -> float:
        """Return the bytes that a device sends under an optimal algorithm; the mean over a group.

        That is `(n-1)/n` of the payload in each round. Of a broadcast, `n-1` of `n` devices send
        all of it, in a ring as in a tree.

        Args:
            payload: Bytes of the whole value.
            size: Devices of a group.
        """
        return self.rounds * payload * (size - 1) / size

    @property
    def reduced_share(self) -> float:
        """Share of the traffic that is reduced on its way."""
        return self.reduces / self.rounds


TRAITS: Mapping[CollectiveKind, CollectiveTraits] = {
    "all-gather": CollectiveTraits("ring", gathers=True),
    "all-reduce": CollectiveTraits("ring", rounds=2, reduces=True),
    "reduce-scatter": CollectiveTraits("ring", reduces=True),
    "all-to-all": CollectiveTraits("exchange"),
    "ragged-all-to-all": CollectiveTraits("exchange"),
    "collective-permute": CollectiveTraits("pairs"),
    "collective-broadcast": CollectiveTraits("broadcast", gathers=True),
}

REDUCING_KINDS = tuple(kind for kind, traits in TRAITS.items() if traits.reduces)
"""Kinds that compute on their way."""

RESHARDING_KINDS = tuple(k for k, t in TRAITS.items() if not t.reduces and not t.gathers)
"""Kinds that change the sharding of a value and leave it as it is otherwise."""

GROUPED_KINDS = tuple(kind for kind, traits in TRAITS.items() if traits.traffic != "pairs")
"""Kinds that have replica groups."""

_PAIRED_KINDS = tuple(kind for kind, traits in TRAITS.items() if traits.traffic == "pairs")


def has_groups(opcode: str) -> bool:
    """Return True for a collective with replica groups, also where the module lists none.

    The end of an asynchronous collective has those of its start no second time.
    """
    return opcode.startswith(GROUPED_KINDS) and not opcode.endswith("-done")


def has_pairs(opcode: str) -> bool:
    """Return True for a collective with pairs of a sender and a receiver, unless it is an end."""
    return opcode.startswith(_PAIRED_KINDS) and not opcode.endswith("-done")
