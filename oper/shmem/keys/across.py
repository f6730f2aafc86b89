"""Keys that lookups in other memory domains and replica groups have seen.

Every memory domain has a copy of the directories of dynamic tables, so that lookups of keys need no
messages. Before each update, every rank sends the keys of its batch to one rank of each other
domain, which adds them to its own. With replica groups, counterparts exchange their keys first.
Changes of a directory depend only on the keys and counts of all batches together, so all copies
stay equal.

A message is int64: the number P of parts, the parts [P, 6], the counts of their keys that have a
row, and their keys without a row (see `Seen`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oper.shmem.group.desync import KEYS
from oper.shmem.protocol import Tables

# Columns of KeyPart in csrc/host/keys/tables.h.
_TABLE, _BEGIN, _END, _MISSED, _COUNTED, _, _WIDTH = range(7)

# The result of finding keys in host memory, in three tensors: counts, int64 [N], lookups of each
# key that has a row, as the kernels take it; int64 [M], the keys without a row, in the order of the
# parts; and the parts, int64 [P, 6], one line per dynamic table: its number, begin and end of its
# ids, its number of keys without a row, and two values for the kernels about the counts.
Seen = tuple[torch.Tensor, ...]


class KeyExchange:
    """Exchanges keys with the other memory domains and replica groups. Creation is not collective.

    Args:
        tables: the collection of the dynamic tables.
        num_places: places of keys in each table's directory, by the tables' numbers.

    Attributes:
        is_first: whether this rank's domain is that of rank 0.
    """

    def __init__(self, tables: Tables, num_places: Sequence[int]) -> None:
        domains = tables.domains
        (mine,) = (members for members in domains if tables.group.rank in members)
        self.is_first = mine is domains[0]
        at = mine.index(tables.group.rank)
        self._receivers = [x[at % len(x)] for x in domains if x is not mine]
        self._num_places = torch.tensor(num_places)

    def exchange(self, tables: Tables, seen: Sequence[Seen]) -> list[Seen]:
        """Send the keys of this rank's lookups and receive those of others. Returns both, to be
        counted in one call. Collective; `seen` may be empty.

        Raises:
            PeerLostError: a rank has refused its batch or has ended.
            OperError: a rank has sent keys that do not fit this rank's tables.
        """
        every = [*seen]
        if tables.replicas is not None:
            for words in tables.replicas.exchange_keys(pack(every)):
                found = unpack(words, self._num_places)
                assert found is not None  # all groups have equal tables
                every.append(found)
        if self._receivers:
            every += tables.send(dict.fromkeys(self._receivers, pack(every)),
                                 lambda words: unpack(words, self._num_places), KEYS)
        return every


def pack(seen: Sequence[Seen]) -> torch.Tensor:
    """Return the keys that lookups have seen (`Seen`) as a message, int64 [n]."""
    parts, counts = [torch.empty(0, _WIDTH, dtype=torch.int64)], []
    first = 0
    for of_counts, _, of_parts in seen:
        moved = of_parts.clone()
        num = moved[:, _COUNTED]
        begin = num.cumsum(0) - num
        n = int(num.sum())
        # Entries at the end of a lookup's `counts` parts are unused.
        counts.append(of_counts[torch.arange(n) + (moved[:, _BEGIN] - begin)
                                 .repeat_interleave(num, output_size=n)])
        moved[:, _BEGIN] = begin + first
        moved[:, _END] = moved[:, _BEGIN] + num
        parts.append(moved)
        first += n
    table = torch.cat(parts)
    return torch.cat([torch.tensor([table.shape[0]]), table.reshape(-1), *counts,
                      *(missed for _, missed, _ in seen)])


def unpack(words: torch.Tensor, num_places: torch.Tensor) -> Seen | None:
    """Return the content of a message, int64 [n]; None if it does not fit directories with
    `num_places` places, int64 [tables]."""
    end = 1 + int(words[0]) * _WIDTH if words.numel() else 0
    if not 1 <= end <= words.numel():
        return None
    parts = words[1:end].view(-1, _WIDTH)
    table, counted, missed = parts[:, _TABLE], parts[:, _COUNTED], parts[:, _MISSED]
    sizes = parts[:, [_COUNTED, _MISSED]]
    if bool(((sizes < 0) | (sizes > words.numel())).any()) or bool(
            ((table < 0) | (table >= num_places.numel())).any()):
        return None
    n = int(counted.sum())
    if (end + n + int(missed.sum()) != words.numel()
            or not torch.equal(parts[:, _BEGIN], counted.cumsum(0) - counted)):
        return None
    counts = words[end:end + n]
    places = counts.view(torch.int32)[::2].long() & 0xFFFFFFFF
    if bool((places >= num_places[table].repeat_interleave(counted, output_size=n)).any()):
        return None
    return counts, words[end + n:], parts
