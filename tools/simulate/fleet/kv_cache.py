"""The prefix cache of a modelled shard: ref-counted blocks, least recently used first, freed tail first.

A tree of runs: each node holds consecutive blocks that live and die alike, so that admitting or freeing a prompt costs
a step per run (a handful), not per block (thousands). It behaves exactly like a cache that tracks every block:
blocks of one run have one reference count and were freed in one go, tail first, so evicting a run from its tail is
evicting its blocks in order.

Hashes are chained: equal hashes stand for equal prefixes, up to and including the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class _Run:
    """Consecutive blocks in the cache."""

    __slots__ = ("children", "hashes", "num_refs", "parent")

    def __init__(self, parent: _Run | None, hashes: list[int], num_refs: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.num_refs = num_refs
        """The number of leases that hold the whole run. Never more than that of the parent."""
        self.children: dict[int, _Run] = {}
        """Keyed by their first hash."""


class Lease:
    """The blocks of one admitted sequence: shared ones in the cache, and private ones."""

    __slots__ = ("_run", "hashes", "num_cached", "num_private")

    def __init__(self, hashes: Sequence[int], run: _Run, num_cached: int, num_private: int) -> None:
        self.hashes = hashes
        """The hashes of the full prompt blocks of the sequence."""
        self.num_cached = num_cached
        """Leading blocks that are in the cache and held."""
        self.num_private = num_private
        """Reserved blocks outside the cache: not yet computed, partial, or for output."""
        self._run = run


class ModelledKvCache:
    """`num_blocks` blocks, each free, private to one lease, or cached (and then held by leases or evictable)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_free = num_blocks
        self._num_evictable = 0
        self._root = _Run(None, [], 1)
        self._unused: OrderedDict[_Run, None] = OrderedDict()
        """Runs without references, least recently used first."""
        self._evicted: list[int] = []

    @property
    def num_available(self) -> int:
        """Blocks that a new sequence could take: free ones, and cached ones that no lease holds."""
        return self._num_free + self._num_evictable

    def count_cached(self, hashes: Sequence[int], limit: int) -> int:
        """How many leading blocks of `hashes` are in the cache, at most `limit`. Changes nothing."""
        return self._walk(hashes, min(limit, len(hashes)))[-1]

    def admit(self, hashes: Sequence[int], num_reusable: int, num_blocks: int) -> Lease | None:
        """Reserve `num_blocks` blocks. Leading ones are taken from the cache if they are in it, at most `num_reusable`.
        Returns None and changes nothing if too few are available."""
        run, partial, num_common, depth = self._walk(hashes, min(num_reusable, len(hashes)))
        num_revived = num_common if partial is not None and not partial.num_refs else 0
        above: _Run | None = run
        while above is not None and not above.num_refs:
            num_revived += len(above.hashes)
            above = above.parent
        num_private = num_blocks - depth
        if num_private > self.num_available - num_revived:
            return None
        if partial is not None:
            run = self._split(partial, num_common)
        above = run
        while above.parent is not None:
            self._hold(above)
            above = above.parent
        if num_private > self._num_free:
            self._evict(num_private - self._num_free)
        self._num_free -= num_private
        return Lease(hashes, run, depth, num_private)

    def store(self, lease: Lease, num_computed: int) -> Sequence[int]:
        """Add the first `num_computed` prompt blocks of a lease, which are computed now, to the cache. Blocks that
        another sequence has computed meanwhile are shared, and the private copies are freed. Returns the new hashes."""
        hashes = lease.hashes
        depth = lease.num_cached
        if num_computed <= depth:
            return ()
        lease.num_private -= num_computed - depth
        lease.num_cached = num_computed
        run = lease._run
        while True:
            child = run.children.get(hashes[depth])
            if child is None:
                break
            num_common = _count_common(child.hashes, hashes, depth, num_computed)
            if num_common < len(child.hashes):
                child = self._split(child, num_common)
            self._hold(child)
            self._num_free += num_common
            run = child
            depth += num_common
            if depth == num_computed:
                lease._run = run
                return ()
        new = hashes[depth:num_computed]
        if run.num_refs == 1 and not run.children and run is not self._root:
            run.hashes.extend(new)
        else:
            child = _Run(run, list(new), 1)
            run.children[new[0]] = child
            run = child
        lease._run = run
        return new

    def free(self, lease: Lease) -> None:
        """Release the blocks of a sequence that has ended. Its cached blocks stay until they are evicted."""
        self._num_free += lease.num_private
        run = lease._run
        while run.parent is not None:
            run.num_refs -= 1
            if not run.num_refs:
                self._unused[run] = None
                self._num_evictable += len(run.hashes)
            run = run.parent

    def take_evicted(self) -> list[int]:
        """Hashes evicted since the last call."""
        evicted = self._evicted
        if evicted:
            self._evicted = []
        return evicted

    def cached_hashes(self) -> list[int]:
        """All cached hashes, parents before children."""
        return [block_hash for run in self._runs() for block_hash in run.hashes]

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Raise AssertionError unless blocks, runs and `leases` (all live ones) account for one another."""
        num_refs: dict[_Run, int] = {}
        for lease in leases:
            run, depth = lease._run, 0
            while run.parent is not None:
                num_refs[run] = num_refs.get(run, 0) + 1
                depth += len(run.hashes)
                run = run.parent
            assert depth == lease.num_cached, "a lease holds other blocks than it counts"
        num_held = 0
        runs = list(self._runs())
        for run in runs:
            assert run.hashes, "an empty run"
            assert run.num_refs == num_refs.get(run, 0), "references do not add up"
            assert (run in self._unused) == (not run.num_refs), "evictable and not in the list, or the reverse"
            num_held += len(run.hashes) if run.num_refs else 0
        num_evictable = sum(len(run.hashes) for run in self._unused)
        assert len(self._unused) <= len(runs)
        assert num_evictable == self._num_evictable
        num_private = sum(lease.num_private for lease in leases)
        assert self._num_free >= 0
        assert self._num_free + num_evictable + num_held + num_private == self.num_blocks, "blocks were lost"

    # -- runs -----------------------------------------------------------------------------------------------------

    def _runs(self) -> Iterator[_Run]:
        stack = list(self._root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def _walk(self, hashes: Sequence[int], limit: int) -> tuple[_Run, _Run | None, int, int]:
        """Follow `hashes` for at most `limit` blocks. Returns the last run that matches in full, the one below it that
        matches in part (or None) with the number of matching blocks, and the depth reached."""
        run, depth = self._root, 0
        while depth < limit:
            child = run.children.get(hashes[depth])
            if child is None:
                break
            num_common = _count_common(child.hashes, hashes, depth, limit)
            depth += num_common
            if num_common < len(child.hashes):
                return run, child, num_common, depth
            run = child
        return run, None, 0, depth

    def _split(self, run: _Run, num_leading: int) -> _Run:
        """Split the first blocks off a run and return them. The caller must hold them at once. Leases that end at `run`
        still end there."""
        assert run.parent is not None
        head = _Run(run.parent, run.hashes[:num_leading], run.num_refs)
        del run.hashes[:num_leading]
        head.children[run.hashes[0]] = run
        run.parent.children[head.hashes[0]] = head
        run.parent = head
        return head

    def _hold(self, run: _Run) -> None:
        if not run.num_refs:
            # The head of a split run is not in the list, where it was part of the run that was split.
            self._unused.pop(run, None)
            self._num_evictable -= len(run.hashes)
        run.num_refs += 1

    def _evict(self, num_blocks: int) -> None:
        """Evict least recently used blocks. The first unused run is always a leaf, because a lease that held a child
        held the run too."""
        self._num_evictable -= num_blocks
        self._num_free += num_blocks
        while num_blocks:
            run = next(iter(self._unused))
            hashes = run.hashes
            if len(hashes) > num_blocks:
                self._evicted.extend(hashes[-num_blocks:])
                del hashes[-num_blocks:]
                return
            assert not run.children
            assert run.parent is not None
            self._evicted.extend(hashes)
            num_blocks -= len(hashes)
            del self._unused[run]
            del run.parent.children[hashes[0]]


def _count_common(run: Sequence[int], hashes: Sequence[int], depth: int, limit: int) -> int:
    """How many leading entries of `run`, at least 1, equal those of hashes[depth:limit]. As hashes are chained, equal
    entries are preceded by equal entries."""
    high = min(len(run), limit - depth)
    if run[high - 1] == hashes[depth + high - 1]:
        return high
    low = 1
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == hashes[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
