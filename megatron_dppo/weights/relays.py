"""Messages of strategy ``tensor`` between the trainer ranks of several hosts.

A trainer rank shares memory only with engines on its host. For every other host of a message's column it sends the
message to a trainer rank there, a relay, which shares it with the engines on its host.

The ranks send in rounds. All ranks divide the plan's messages into the same rounds, so each knows what it receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron_dppo.model.shard_plan import Message, ShardPlan
from megatron_dppo.weights.shards import bytes_of


@dataclass
class Round:
    """What a trainer rank does in a round.

    Attributes:
        batch: messages of its own.
        sends: messages of the batch, each with the rank that relays it to another host.
        receives: messages that it relays to its own host, each with the rank that sends it.
    """

    batch: list[Message] = field(default_factory=list)
    sends: list[tuple[Message, int]] = field(default_factory=list)
    receives: list[tuple[Message, int]] = field(default_factory=list)


class Relays:
    """The relays of a plan.

    Args:
        plan: the plan.
        hosts: for each trainer rank, the numbers of the engines' hosts that are its own host: none or one, or several
            if servers name one host in several ways.
    """

    def __init__(self, plan: ShardPlan, hosts: Sequence[Collection[int]]) -> None:
        self._plan = plan
        self._hosts = hosts
        self._trainer_ranks: dict[int, list[int]] = defaultdict(list)
        for rank, numbers in enumerate(hosts):
            for number in numbers:
                self._trainer_ranks[number].append(rank)
        self._engine_ranks: dict[int, list[int]] = defaultdict(list)
        for engine_rank, number in enumerate(plan.hosts):
            self._engine_ranks[number].append(engine_rank)

    @property
    def unreached_hosts(self) -> list[int]:
        """The hosts of engines that have no trainer rank."""
        return [number for number in self._engine_ranks if not self._trainer_ranks[number]]

    @property
    def are_needed(self) -> bool:
        """Whether a message has to reach another host than its sender's."""
        return any(self._of(message) for message in self._plan.messages)

    def is_local(self, trainer_rank: int, engine_rank: int) -> bool:
        """Return whether the two ranks are on one host."""
        return self._plan.hosts[engine_rank] in self._hosts[trainer_rank]

    def rounds(self, rank: int, batch_bytes: int, relayed_bytes: int) -> list[Round]:
        """Return the rounds of a trainer rank.

        Args:
            rank: the rank.
            batch_bytes: the largest size of what a rank packs in a round; a larger message has a round of its own.
            relayed_bytes: the largest size of what a rank receives in a round, likewise.
        """
        rounds: list[Round] = []
        packed: list[Counter[int]] = []
        received: list[Counter[int]] = []
        last_round = Counter[int]()
        """The last round in which a rank sends."""
        for message in self._plan.messages:
            size = bytes_of([message])
            relays = self._of(message)
            number = last_round[message.sender]
            while number < len(rounds):
                has_room = packed[number][message.sender] + size <= batch_bytes
                if has_room and all(received[number][r] + size <= relayed_bytes for r in relays):
                    break
                number += 1
            else:
                rounds.append(Round())
                packed.append(Counter())
                received.append(Counter())
            last_round[message.sender] = number
            packed[number][message.sender] += size
            received[number].update(dict.fromkeys(relays, size))
            if message.sender == rank:
                rounds[number].batch.append(message)
                rounds[number].sends += [(message, relay) for relay in relays]
            elif rank in relays:
                rounds[number].receives.append((message, message.sender))
        return rounds

    def _of(self, message: Message) -> list[int]:
        """Return the relays of a message, one on each host that is not its sender's."""
        relays: dict[int, int] = {}
        for engine_rank in message.column:
            number = self._plan.hosts[engine_rank]
            if number in relays or self.is_local(message.sender, engine_rank):
                continue
            # By their order, the trainer rank and the engine rank of a colocated run share a GPU.
            trainer_ranks = self._trainer_ranks[number]
            position = self._engine_ranks[number].index(engine_rank)
            relays[number] = trainer_ranks[position % len(trainer_ranks)]
        return list(dict.fromkeys(relays.values()))
