"""Model checking of the barrier.

The model has the atomic steps of csrc/host/barrier.cpp. Every interleaving is explored, and
mutations of the protocol must violate the checked properties.
"""

import pytest

# One rank's state: (step, peer, seen, round). A shared word is written through a store buffer, as
# on x86: others see the value when it leaves the buffer. A seq_cst store is followed by a fence; a
# release store is not. Read-modify-writes empty the buffer first.

STORE, LOOK, WAKE, TEST, ENTER, READ, SLEEP, ASLEEP, LEAVE, DONE = range(10)


class BarrierModel:
    """All states of W ranks that pass the barrier several times.

    Args:
        world_size: number of ranks W.
        rounds: number of times that each rank passes the barrier.
        mutation: name of a change of the protocol; ``""`` = none.
    """

    def __init__(self, world_size: int, rounds: int, mutation: str = "") -> None:
        self.size, self.rounds, self.mutation = world_size, rounds, mutation
        start = (STORE, 1, 0, 1)
        # Ranks, epochs and sleepers by rank, whether a rank's store waits in its buffer.
        zeros = (0,) * world_size
        self.start = ((start,) * world_size, zeros, zeros, (None,) * world_size)

    def check(self) -> int:
        """Return the number of states; raises AssertionError at the first bad one."""
        seen, todo = {self.start}, [self.start]
        while todo:
            state = todo.pop()
            found = list(self.following(state))
            assert found or all(r[0] == DONE for r in state[0]), f"asleep for ever: {state}"
            todo += set(found) - seen
            seen.update(found)
        return len(seen)

    def following(self, state):
        ranks, epochs, sleepers, buffers = state
        for r in range(self.size):
            if buffers[r] is not None:  # leaves the buffer
                yield ranks, put(epochs, r, buffers[r]), sleepers, put(buffers, r, None)
            yield from self.step(state, r)

    def step(self, state, r: int):
        ranks, epochs, sleepers, buffers = state
        step, peer, seen, target = ranks[r]
        p = (r + peer) % self.size

        def go(step: int, peer: int = peer, seen: int = seen, target: int = target, *,
               sleepers=sleepers, buffers=buffers, others=ranks):
            return put(others, r, (step, peer, seen, target)), epochs, sleepers, buffers

        if step == STORE:
            yield go(LOOK, buffers=put(buffers, r, target))
        elif step == LOOK:
            if buffers[r] is not None and self.mutation != "release store":
                return  # the fence: the store leaves the buffer first
            yield go(TEST if sleepers[r] == 0 else WAKE)
        elif step == WAKE:
            others = ranks
            if self.mutation != "no wake":
                for q, (s, k, x, t) in enumerate(ranks):
                    if s == ASLEEP and (q + k) % self.size == r:
                        others = put(others, q, (LEAVE, k, x, t))
            yield go(TEST, others=others)
        elif step == TEST:
            if epochs[p] < target and self.mutation != "no wait":
                yield go(ENTER)
            elif peer + 1 < self.size:
                yield go(TEST, peer + 1)
            else:
                short = [q for q in range(self.size) if q != r and epochs[q] < target]
                assert not short, f"rank {r} passed barrier {target} without {short}: {state}"
                done = target == self.rounds
                yield go(DONE) if done else go(STORE, 1, 0, target + 1)
        elif step == ENTER:
            if buffers[r] is None:
                yield go(READ, sleepers=put(sleepers, p, sleepers[p] + 1))
        elif step == READ:
            yield go(LEAVE if epochs[p] >= target else SLEEP, seen=epochs[p])
        elif step == SLEEP:  # the kernel compares and goes to sleep in one step
            changed = epochs[p] != seen and self.mutation != "sleep without comparing"
            yield go(LEAVE if changed else ASLEEP)
        elif step == LEAVE and buffers[r] is None:
            yield go(TEST, sleepers=put(sleepers, p, sleepers[p] - 1))


def put(values: tuple, at: int, value) -> tuple:
    return (*values[:at], value, *values[at + 1:])


@pytest.mark.parametrize("world_size, rounds", [(2, 1), (2, 3), (3, 1), (3, 2)])
def test_no_rank_passes_early_or_sleeps_forever(world_size: int, rounds: int) -> None:
    """The model lacks the sleepers' timeout of 100 ms, which would hide a lost wake-up."""
    assert BarrierModel(world_size, rounds).check() > 50


@pytest.mark.parametrize("mutation", ["release store", "no wake", "sleep without comparing",
                                      "no wait"])
def test_a_wrong_barrier_is_caught(mutation: str) -> None:
    with pytest.raises(AssertionError, match=r"asleep|passed"):
        BarrierModel(2, 2, mutation).check()
