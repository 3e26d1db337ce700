"""Builds of several tables at once by a pool of processes, in chunks that can be kept and taken up again.

Owns the order of work. A chunk is a range of combinations of one size; its result does not depend on how the work is
cut or on how many processes there are. Keeping chunks is the caller's matter, through ``ChunkKeeper``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.content import content_digest
from coral_tasks.domain.names import LatencySplit
from coral_tasks.domain.profiles import ProfileTable
from coral_tasks.domain.validation import Checks
from coral_tasks.placement.combinations import CombinationTree, build_tree
from coral_tasks.placement.search import Solutions, solve_chunk
from coral_tasks.templates.build import BuildResult, check_table, finish_template_set, in_name_order, tree_of
from coral_tasks.templates.options import BuildOptions

CODE_SCHEMA: Final = 1
"""Part of every key: raise it when the same table would give other templates."""

CHUNK_SIZE: Final = 20_000
"""Combinations of a chunk: some seconds of work, and large enough that chunks share most of what they prepare."""


class ChunkKeeper(Protocol):
    """Keeps finished chunks, as arrays by name, between runs."""

    def load(self, key: str, first: int, last: int) -> Mapping[str, NDArray[np.generic]] | None:
        """A kept chunk, None if it is absent or damaged."""

    def save(self, key: str, first: int, last: int, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Keep a finished chunk."""


class Progress(NamedTuple):
    """How far all builds are, in combinations; ``label`` names the table just worked on."""

    done: int
    total: int
    label: str


def set_key(table: ProfileTable, options: BuildOptions) -> str:
    """Hash of everything a template set is made from: table, options and code schema."""
    return content_digest("template_set", CODE_SCHEMA, in_name_order(table), options)


class _Task(NamedTuple):
    """One chunk, as sent to a process."""

    table: NDArray[np.float64]
    tree: tuple[int, int, tuple[float, ...], float]
    split: LatencySplit
    values: NDArray[np.float64]
    first: int
    last: int


@lru_cache(maxsize=2)
def _tree(parameters: tuple[int, int, tuple[float, ...], float]) -> CombinationTree:
    max_nodes, count, memory, limit = parameters
    return build_tree(max_nodes=max_nodes, num_configurations=count, node_memory=np.array(memory), memory_limit=limit)


def _run(task: _Task) -> Solutions:
    return solve_chunk(task.table, _tree(task.tree), task.split, task.values, task.first, task.last)


@dataclass(slots=True, kw_only=True, eq=False)
class _Build:
    """State of one table's build: sizes are worked off one after another."""

    key: str
    table: ProfileTable
    options: BuildOptions
    tree: CombinationTree
    found: Solutions
    size: int = 0
    open_chunks: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, table: ProfileTable, options: BuildOptions) -> _Build:
        check_table(table)
        ordered = in_name_order(table)
        tree = tree_of(ordered, options)
        found = Solutions.empty(tree.total, tree.max_nodes)
        return cls(key=set_key(table, options), table=ordered, options=options, tree=tree, found=found)

    @property
    def label(self) -> str:
        return f"{self.table.model} {self.table.phase}"

    @property
    def done(self) -> bool:
        return self.size > self.tree.max_nodes

    def next_chunks(self) -> list[tuple[int, int]]:
        """Chunks of the next size, once all of the size before are in; empty while some are open."""
        chunks: list[tuple[int, int]] = []
        while not self.open_chunks and not chunks and not self.done:
            self.size += 1
            if not self.done:
                chunks = _chunks_of(self.tree, self.size)
        self.open_chunks.update(chunks)
        return chunks

    def task(self, first: int, last: int) -> _Task:
        """One chunk of size ``size``."""
        options, table = self.options, self.table
        limit = np.inf if options.memory_ratio is None else options.memory_ratio * table.checkpoint_bytes
        memory = tuple(float(one) for one in table.node_memory_bytes)
        tree = (options.max_nodes, len(memory), memory, limit)
        smaller = self.found.throughput[: int(self.tree.offsets[self.size])]
        return _Task(table.throughput, tree, options.latency_split, smaller, first, last)

    def kept(self, keeper: ChunkKeeper | None, first: int, last: int) -> Solutions | None:
        """A chunk that ``keeper`` has, None if it has none or a damaged one."""
        stored = None if keeper is None else keeper.load(self.key, first, last)
        return None if stored is None else Solutions.from_arrays(stored, last - first, self.tree.max_nodes)

    def take(self, first: int, last: int, part: Solutions) -> None:
        self.found.put(first, part)
        self.open_chunks.remove((first, last))

    def finish(self) -> BuildResult:
        return finish_template_set(self.table, self.options, self.tree, self.found)


def _chunks_of(tree: CombinationTree, size: int) -> list[tuple[int, int]]:
    first, last = int(tree.offsets[size]), int(tree.offsets[size + 1])
    return [(start, min(start + CHUNK_SIZE, last)) for start in range(first, last, CHUNK_SIZE)]


def large_chunks(table: ProfileTable, options: BuildOptions) -> list[tuple[int, int]]:
    """Ranges of the largest size, if there are several: most of the work, and worth spreading over machines."""
    check_table(table)
    chunks = _chunks_of(tree_of(in_name_order(table), options), options.max_nodes)
    return chunks if len(chunks) > 1 else []


def keep_smaller(table: ProfileTable, options: BuildOptions, keeper: ChunkKeeper) -> None:
    """Solve and keep every size but the largest: what all of its chunks rest on."""
    _with_smaller(table, options, keeper)


def keep_large_chunk(table: ProfileTable, options: BuildOptions, keeper: ChunkKeeper, first: int, last: int) -> None:
    """Solve and keep one of ``large_chunks``. Smaller sizes that are not kept yet are solved first."""
    build = _with_smaller(table, options, keeper)
    build.size = build.tree.max_nodes
    _kept_or_solved(build, keeper, first, last)


def _with_smaller(table: ProfileTable, options: BuildOptions, keeper: ChunkKeeper) -> _Build:
    build = _Build.of(table, options)
    for size in range(1, build.tree.max_nodes):
        build.size = size
        for first, last in _chunks_of(build.tree, size):
            build.found.put(first, _kept_or_solved(build, keeper, first, last))
    return build


def _kept_or_solved(build: _Build, keeper: ChunkKeeper, first: int, last: int) -> Solutions:
    kept = build.kept(keeper, first, last)
    if kept is not None:
        return kept
    found = _run(build.task(first, last))
    keeper.save(build.key, first, last, found.arrays())
    return found


class _Runner(Protocol):
    """Where tasks run: here, or in a pool."""

    def submit(self, task: _Task) -> Future[Solutions]: ...


class _Inline:
    """Runs a task at once in this process."""

    def submit(self, task: _Task) -> Future[Solutions]:
        future: Future[Solutions] = Future()
        future.set_result(_run(task))
        return future


class _Pool:
    """Runs tasks in other processes."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def submit(self, task: _Task) -> Future[Solutions]:
        return self._executor.submit(_run, task)


@contextmanager
def _runner(processes: int) -> Iterator[_Runner]:
    """Processes are spawned, not forked: a fork of a process with threads can hang."""
    if processes == 1:
        yield _Inline()
        return
    executor = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield _Pool(executor)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def build_template_sets(
    tables: Sequence[ProfileTable],
    options: BuildOptions,
    *,
    processes: int = 1,
    keeper: ChunkKeeper | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[tuple[str, BuildResult]]:
    """Build every table; yields (key, result) as each is finished.

    Chunks that ``keeper`` has are not solved again; every finished chunk goes to it at once, so that an interruption
    loses only chunks in work. Raises ValidationFailed before any work if a table or ``processes`` is wrong.
    """
    checks = Checks("build_options")
    checks.require(processes >= 1, "processes must be at least 1", processes)
    checks.raise_if_any()
    work = _Work([_Build.of(table, options) for table in tables], keeper, on_progress)
    with _runner(processes) as runner:
        # a few builds at a time keep all processes busy without holding every table's results in memory
        yield from work.run(runner, abreast=processes + 1)


class _Work:
    """The loop over all builds."""

    def __init__(
        self, builds: list[_Build], keeper: ChunkKeeper | None, on_progress: Callable[[Progress], None]
    ) -> None:
        self._waiting, self._active = builds, list[_Build]()
        self._keeper, self._on_progress = keeper, on_progress
        self._total, self._done = sum(build.tree.total - 1 for build in builds), 0
        self._running: dict[Future[Solutions], tuple[_Build, int, int]] = {}

    def run(self, runner: _Runner, abreast: int) -> Iterator[tuple[str, BuildResult]]:
        while self._waiting or self._active:
            while self._waiting and len(self._active) < abreast:
                self._active.append(self._waiting.pop(0))
            for build in self._active:
                self._start(build, runner)
            finished = [build for build in self._active if build.done]
            self._active = [build for build in self._active if not build.done]
            for build in finished:
                yield build.key, build.finish()
            if self._running:
                self._collect()

    def _start(self, build: _Build, runner: _Runner) -> None:
        chunks = build.next_chunks()
        while chunks:
            for first, last in chunks:
                kept = build.kept(self._keeper, first, last)
                if kept is None:
                    self._running[runner.submit(build.task(first, last))] = (build, first, last)
                else:
                    self._take(build, first, last, kept)
            chunks = build.next_chunks()

    def _collect(self) -> None:
        ready, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in [one for one in self._running if one in ready]:  # as submitted: a set has no order to repeat
            build, first, last = self._running.pop(future)
            found = future.result()
            if self._keeper is not None:
                self._keeper.save(build.key, first, last, found.arrays())
            self._take(build, first, last, found)

    def _take(self, build: _Build, first: int, last: int, found: Solutions) -> None:
        build.take(first, last, found)
        self._done += last - first
        self._on_progress(Progress(self._done, self._total, build.label))
