"""The event loop, compiled: routing, queues, batches, stages, caches, transfers, loss.

Owns the rules of the simulated fleet. Pure with regard to its arguments: no clock, no randomness, no I/O; the heap is
keyed by (time, priority, sequence), so equal inputs give equal outputs. Must not know plans, prices or templates.
All compiled code stands in this one file: numba's cache does not notice a change in another file.

Batching follows vLLM: an instance with S stages has S groups (micro-batches) in flight, each step of a group takes its
decoding sequences and fills the token budget with prompts, long prompts in chunks; a group passes the stages in order
and no group overtakes another. Stage time is that of its slowest node, each with its share of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numba

from coral_tasks.simulation.state import (
    ABSENT,
    ACTIVE,
    CONTINUE,
    CONTROL,
    DECODE,
    DRAIN,
    DRAINING,
    GONE,
    GROUP_START,
    IDLE,
    LOSE,
    MAKE_READY,
    OUT_IS_FULL,
    PREFILL,
    RUNNING,
    SCHEDULED,
    SET_ADMITTED,
    SET_WEIGHT,
    STEP_END,
    TOO_MANY_IN_FLIGHT,
    TRANSFER_END,
    Outcome,
    Records,
    State,
)

_COMPLETED = int(Outcome.COMPLETED)
_REFUSED = int(Outcome.REFUSED)
_TOO_LONG = int(Outcome.TOO_LONG)
_SHED = int(Outcome.SHED)
_UNROUTABLE = int(Outcome.UNROUTABLE)
_LOST = int(Outcome.LOST)
_UNFINISHED = int(Outcome.UNFINISHED)

# Answers of the router that are no instance.
_NO_INSTANCE = -1
_NONE_FITS = -2


_njit = cast("Any", numba.njit)
"""Its stub does not know the wrapper options."""


def _compiled[F: Callable[..., Any]](function: F) -> F:
    """Numba in nopython mode, for calls from compiled code only: without Python wrappers it compiles faster."""
    return cast("F", _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")(function))


def _entry_point[F: Callable[..., Any]](function: F) -> F:
    """Numba in nopython mode, cached on disk, callable from Python, without changing the function's type."""
    return cast("F", _njit(cache=True, no_cfunc_wrapper=True, error_model="numpy")(function))


@_compiled
def _before(heap: Records, i: int, j: int) -> bool:
    one, two = heap[i], heap[j]
    if one.time != two.time:
        return bool(one.time < two.time)
    if one.kind != two.kind:
        return bool(one.kind < two.kind)
    return bool(one.sequence < two.sequence)


@_compiled
def _swap(heap: Records, i: int, j: int) -> None:
    one, two = heap[i], heap[j]
    time, kind, sequence, a, b, x = one.time, one.kind, one.sequence, one.a, one.b, one.x
    one.time, one.kind, one.sequence, one.a, one.b, one.x = two.time, two.kind, two.sequence, two.a, two.b, two.x
    two.time, two.kind, two.sequence, two.a, two.b, two.x = time, kind, sequence, a, b, x


@_entry_point
def push_event(state: State, time: float, kind: int, a: int, b: int, x: float) -> None:
    """Add an event; among equal time and kind the earlier push comes first."""
    clock, heap = state.clock[0], state.heap
    i = clock.heap_size
    clock.heap_size += 1
    event = heap[i]
    event.time, event.kind, event.sequence, event.a, event.b, event.x = time, kind, clock.sequence, a, b, x
    clock.sequence += 1
    while i > 0 and _before(heap, i, (i - 1) // 2):
        _swap(heap, i, (i - 1) // 2)
        i = (i - 1) // 2


@_compiled
def _drop_top(state: State) -> None:
    clock, heap = state.clock[0], state.heap
    clock.heap_size -= 1
    size = clock.heap_size
    _swap(heap, 0, size)
    i = 0
    while True:
        least = i
        for child in (2 * i + 1, 2 * i + 2):
            if child < size and _before(heap, child, least):
                least = child
        if least == i:
            return
        _swap(heap, i, least)
        i = least


@_compiled
def _route(state: State, model: int, entry: bool, region: int, tokens: int, prompt: int) -> int:
    """An active instance that can hold the request, by smooth weighted round robin; ``region`` -1: any.

    ``entry``: prefill and aggregated instances, else decode. With the router by load, round robin still chooses the
    region, since its decode instances were planned for that share, and the least load for its weight the instance.
    """
    i = _next_in_turn(state, model, entry, region, tokens, prompt)
    if i >= 0 and state.clock[0].least_loaded == 1:
        i = _least_loaded(state, model, entry, state.instances[i].region, tokens, prompt)
    if i >= 0:
        state.instances[i].load += _held_tokens(state.instances[i], tokens, prompt)
    return i


@_compiled
def _held_tokens(instance: Any, tokens: int, prompt: int) -> int:
    """Cache that a request needs at its longest: the prompt in prefill, else prompt and answer."""
    return prompt if instance.phase == PREFILL else tokens


@_compiled
def _takes(instance: Any, entry: bool, region: int) -> bool:
    """Whether an instance takes requests of this side and region at all."""
    active = instance.state == ACTIVE and instance.weight > 0.0
    return bool(active and (instance.phase != DECODE) == entry and region in (-1, instance.region))


@_compiled
def _least_loaded(state: State, model: int, entry: bool, region: int, tokens: int, prompt: int) -> int:
    """Least load with this request, for the weight, among those that can hold it; the first of equals."""
    first, count = state.models[model].first_instance, state.models[model].num_instances
    best, least = -1, math.inf
    for i in range(first, first + count):
        instance = state.instances[i]
        need = _held_tokens(instance, tokens, prompt)
        if not _takes(instance, entry, region) or need > instance.kv_capacity:
            continue
        load = (instance.load + need) / instance.weight
        if load < least:
            best, least = i, load
    return best


@_compiled
def _next_in_turn(state: State, model: int, entry: bool, region: int, tokens: int, prompt: int) -> int:
    """Smooth weighted round robin among those that can hold the request."""
    first, count = state.models[model].first_instance, state.models[model].num_instances
    best, best_credit, total, seen = -1, -math.inf, 0.0, False
    for i in range(first, first + count):
        instance = state.instances[i]
        if not _takes(instance, entry, region):
            continue
        seen = True
        if _held_tokens(instance, tokens, prompt) > instance.kv_capacity:
            continue
        instance.credit += instance.weight
        total += instance.weight
        if instance.credit > best_credit:
            best, best_credit = i, instance.credit
    if best >= 0:
        state.instances[best].credit -= total
        return best
    return _NONE_FITS if seen else _NO_INSTANCE


@_compiled
def _enqueue(state: State, i: int, s: int, front: bool) -> None:
    instance, slot = state.instances[i], state.slots[s]
    slot.instance = i
    slot.next = -1
    if instance.queued == 0:
        instance.queue_head = s
        instance.queue_tail = s
    elif front:
        slot.next = instance.queue_head
        instance.queue_head = s
    else:
        state.slots[instance.queue_tail].next = s
        instance.queue_tail = s
    instance.queued += 1


@_compiled
def _dequeue(state: State, i: int) -> int:
    instance = state.instances[i]
    s = instance.queue_head
    instance.queue_head = state.slots[s].next
    instance.queued -= 1
    return int(s)


@_compiled
def _end_request(state: State, s: int, outcome: int) -> None:
    """Write the request's record and free its slot."""
    clock, slot = state.clock[0], state.slots[s]
    out = state.out[clock.out_size]
    clock.out_size += 1
    out.index, out.model, out.outcome = slot.index, slot.model, outcome
    out.entry, out.instance = slot.entry, slot.instance
    out.prompt, out.output, out.generated = slot.prompt, slot.output, slot.generated
    out.arrival, out.first, out.finish = slot.arrival, slot.first, clock.now
    out.ready, out.second = slot.ready, slot.second
    out.preemptions, out.retries = slot.preemptions, slot.retries
    slot.used = 0
    slot.next = clock.free_slot
    clock.free_slot = s
    clock.in_flight -= 1


@_compiled
def _wake(state: State, i: int, every: bool) -> None:
    """Let idle groups look at the queue as soon as the first stage is free."""
    instance = state.instances[i]
    if instance.queued == 0:
        return
    time = max(state.clock[0].now, state.stages[instance.first_stage].free_at)
    for g in range(instance.first_group, instance.first_group + instance.num_groups):
        if state.groups[g].state == IDLE:
            state.groups[g].state = SCHEDULED
            push_event(state, time, GROUP_START, g, 0, 0.0)
            if not every:
                return


@_compiled
def _enter(state: State, s: int) -> None:
    """Send a request to a prefill or aggregated instance, from its first token on."""
    slot = state.slots[s]
    i = _route(state, slot.model, True, -1, slot.prompt + slot.output, slot.prompt)  # noqa: FBT003
    if i < 0:
        _end_request(state, s, _TOO_LONG if i == _NONE_FITS else _UNROUTABLE)
        return
    slot.todo, slot.held, slot.generated, slot.entry = slot.prompt, 0, 0, i
    slot.first, slot.ready, slot.second = math.nan, math.nan, math.nan
    _enqueue(state, i, s, False)  # noqa: FBT003
    _wake(state, i, False)  # noqa: FBT003


@_compiled
def _arrive(state: State, index: int, arrivals: Records, row: int) -> None:
    clock, arrival = state.clock[0], arrivals[row]
    s = clock.free_slot
    slot = state.slots[s]
    clock.free_slot = slot.next
    clock.in_flight += 1
    clock.peak_in_flight = max(clock.peak_in_flight, clock.in_flight)
    slot.index, slot.model, slot.prompt, slot.output = index, arrival.model, arrival.prompt, arrival.output
    slot.arrival, slot.entry, slot.instance = arrival.time, -1, -1
    slot.first, slot.ready, slot.second = math.nan, math.nan, math.nan
    slot.generated, slot.preemptions, slot.retries, slot.used = 0, 0, 0, 1
    model = state.models[arrival.model]
    model.admit_credit += model.admit_share
    if model.admit_credit < 1.0 - 1e-12:
        _end_request(state, s, _REFUSED)
        return
    model.admit_credit -= 1.0
    _enter(state, s)


@_compiled
def _retry(state: State, s: int) -> None:
    """Start over elsewhere after a loss, or give up."""
    slot = state.slots[s]
    slot.retries += 1
    if slot.retries > state.clock[0].max_retries:
        _end_request(state, s, _LOST)
    else:
        _enter(state, s)


@_compiled
def _hand_over(state: State, s: int, region: int) -> None:
    """Send a prefilled request's cache to a decode instance, in its region if there is one."""
    slot = state.slots[s]
    tokens = slot.prompt + slot.output
    i = _route(state, slot.model, False, region, tokens, slot.prompt)  # noqa: FBT003
    if i == _NO_INSTANCE:
        i = _route(state, slot.model, False, -1, tokens, slot.prompt)  # noqa: FBT003
        state.clock[0].num_cross_region += i >= 0
    if i < 0:
        _end_request(state, s, _TOO_LONG if i == _NONE_FITS else _UNROUTABLE)
        return
    model = state.models[slot.model]
    slot.instance = i
    state.instances[i].in_transfer += 1
    delay = model.transfer_fixed + model.transfer_token * slot.prompt
    push_event(state, state.clock[0].now + delay, TRANSFER_END, s, i, 0.0)


@_compiled
def _transfer_end(state: State, s: int, i: int) -> None:
    state.instances[i].in_transfer -= 1
    if state.instances[i].state == GONE:
        _retry(state, s)
        return
    state.slots[s].todo, state.slots[s].ready = 0, state.clock[0].now
    _enqueue(state, i, s, False)  # noqa: FBT003
    _wake(state, i, False)  # noqa: FBT003


@_compiled
def _needs_cache(state: State, s: int) -> int:
    """Tokens whose cache must be held when this waiting request is admitted."""
    return int(state.slots[s].prompt + state.slots[s].generated)


@_compiled
def _num_decoding(state: State, g: int) -> int:
    group, count = state.groups[g], 0
    for k in range(group.first_run, group.first_run + group.size):
        count += state.slots[state.running[k]].todo == 0
    return count


@_compiled
def _preempt_youngest(state: State, g: int) -> None:
    """Take the youngest sequence off, free its cache, and put it first in the queue, to be computed again."""
    group = state.groups[g]
    instance = state.instances[group.instance]
    s = state.running[group.first_run + group.size - 1]
    slot = state.slots[s]
    group.size -= 1
    instance.running -= 1
    instance.kv_used -= slot.held
    slot.held, slot.chunk = 0, 0
    slot.todo = slot.prompt + slot.generated
    slot.preemptions += 1
    state.clock[0].num_preemptions += 1
    _enqueue(state, group.instance, s, True)  # noqa: FBT003


@_compiled
def _make_room(state: State, g: int) -> int:
    """Preempt until each decoding sequence can grow by one token; returns how many decode."""
    instance = state.instances[state.groups[g].instance]
    count = _num_decoding(state, g)
    while count > 0 and instance.kv_used + count > instance.kv_capacity:
        _preempt_youngest(state, g)
        count = _num_decoding(state, g)
    return count


@_compiled
def _shed_head(state: State, i: int) -> bool:
    """Drop the first in the queue if its time to first token has passed and its model sheds."""
    s = state.instances[i].queue_head
    slot = state.slots[s]
    model = state.models[slot.model]
    late = slot.generated == 0 and state.clock[0].now - slot.arrival > model.ttft_slo
    if model.shed == 0 or not late:
        return False
    _dequeue(state, i)
    state.instances[i].load -= slot.prompt if state.instances[i].phase == PREFILL else slot.prompt + slot.output
    _end_request(state, s, _SHED)
    return True


@_compiled
def _admit(state: State, g: int, decoding: int) -> int:
    """Fill the group from the queue within its even share, its size, the cache and the token budget.

    Returns the prompt tokens of the step; sets each sequence's chunk.
    """
    group = state.groups[g]
    i = group.instance
    instance = state.instances[i]
    left, prompt_tokens = instance.budget - decoding, 0
    left += _long_prompt_extra(state, g)
    for k in range(group.first_run, group.first_run + group.size):
        slot = state.slots[state.running[k]]
        slot.chunk = max(min(slot.todo, left), 0)
        left -= slot.chunk
        prompt_tokens += slot.chunk
    share = (instance.running + instance.queued + instance.num_groups - 1) // instance.num_groups
    limit = min(share, group.capacity)
    while instance.queued > 0 and group.size < limit and left > 0:
        if _shed_head(state, i):
            continue
        need = _needs_cache(state, instance.queue_head)
        # One token of room each for those that decode: else the newcomer would be preempted at once.
        grows = decoding + (state.slots[instance.queue_head].todo == 0)
        if instance.kv_used + need + grows > instance.kv_capacity and instance.kv_used > 0:
            break
        slot = _take_in(state, g, need)
        if prompt_tokens == 0:
            left += _long_prompt_extra(state, g)
        slot.chunk = min(slot.todo, left)
        decoding += slot.todo == 0
        left -= max(slot.chunk, 1)
        prompt_tokens += slot.chunk
    return prompt_tokens


@_compiled
def _long_prompt_extra(state: State, g: int) -> int:
    """Tokens beyond the budget so that a prefill group's first prompt goes whole, in chunks that follow one another.

    vLLM schedules a prompt's next chunk before the last one has left the pipeline, so chunks overlap over the stages.
    """
    group = state.groups[g]
    instance = state.instances[group.instance]
    if instance.phase != PREFILL or group.size == 0:
        return 0
    todo = state.slots[state.running[group.first_run]].todo
    return int((todo - 1) // instance.budget * instance.budget)


@_compiled
def _take_in(state: State, g: int, need: int) -> Any:
    """Move the head of the queue into the group and reserve its cache."""
    group = state.groups[g]
    instance = state.instances[group.instance]
    s = _dequeue(state, group.instance)
    slot = state.slots[s]
    state.running[group.first_run + group.size] = s
    group.size += 1
    instance.running += 1
    slot.held = need
    instance.kv_used += need
    instance.kv_peak = max(instance.kv_peak, instance.kv_used)
    return slot


@_compiled
def _stage_s(state: State, stage: Any, prompt_tokens: int, sequences: int, context_tokens: int) -> float:
    """Seconds of one batch in a stage: its slowest node, each with its share."""
    slowest = 0.0
    for n in range(stage.first_node, stage.first_node + stage.num_nodes):
        node = state.nodes[n]
        part = node.prompt_token * prompt_tokens + node.sequence * sequences + node.context_token * context_tokens
        slowest = max(slowest, node.fixed + node.share * part)
    return slowest


@_compiled
def _pass_stages(state: State, g: int, prompt_tokens: int, sequences: int, context_tokens: int) -> None:
    """Book the batch through all stages (first in, first out at each) and push the end of the step.

    Prompts beyond the token budget follow in chunks: each enters a stage when the one before has left it.
    """
    instance = state.instances[state.groups[g].instance]
    time, left, sent = 0.0, prompt_tokens, False
    while left > 0 or not sent:
        chunk = min(left, instance.budget) if instance.phase == PREFILL else left
        left -= chunk
        sent = True
        time = state.clock[0].now
        for k in range(instance.first_stage, instance.first_stage + instance.num_stages):
            stage = state.stages[k]
            took = _stage_s(state, stage, chunk, sequences, context_tokens)
            time = max(time, stage.free_at) + took
            stage.free_at = time
            stage.busy += took
            time += stage.hop
    instance.num_steps += 1
    push_event(state, time, STEP_END, g, 0, 0.0)


@_compiled
def _start_step(state: State, g: int) -> None:
    """Form the group's next batch and send it off; go idle if there is nothing to do."""
    group = state.groups[g]
    decoding = _make_room(state, g)
    prompt_tokens = _admit(state, g, decoding)
    sequences, context_tokens = 0, 0
    for k in range(group.first_run, group.first_run + group.size):
        slot = state.slots[state.running[k]]
        if slot.todo == 0:
            sequences += 1
            context_tokens += slot.held
    if sequences + prompt_tokens == 0:
        group.state = IDLE
        return
    group.state = RUNNING
    # Reserved now, as vLLM does: the instance's other groups must not take the same room while this one is under way.
    state.instances[group.instance].kv_used += sequences
    _pass_stages(state, g, prompt_tokens, sequences, context_tokens)


@_compiled
def _advance(state: State, s: int, i: int) -> bool:
    """Account one step of a sequence; True if it leaves its group."""
    instance, slot = state.instances[i], state.slots[s]
    if slot.todo > 0:
        slot.todo -= slot.chunk
        slot.chunk = 0
        if slot.todo > 0:
            return False
    else:
        slot.held += 1  # its room is counted as used since the step began
    slot.generated += 1
    if slot.generated == 1:
        slot.first, slot.ready = state.clock[0].now, state.clock[0].now
    elif slot.generated == 2:
        slot.second = state.clock[0].now
    return bool(slot.generated >= slot.output or instance.phase == PREFILL)


@_compiled
def _leave(state: State, s: int, i: int) -> None:
    """Free the sequence's cache; end the request or hand it over to decode."""
    instance, slot = state.instances[i], state.slots[s]
    instance.kv_used -= slot.held
    slot.held = 0
    instance.running -= 1
    instance.num_finished += 1
    instance.load -= slot.prompt if instance.phase == PREFILL else slot.prompt + slot.output
    if slot.generated >= slot.output:
        _end_request(state, s, _COMPLETED)
    else:
        _hand_over(state, s, instance.region)


@_compiled
def _step_end(state: State, g: int) -> None:
    group = state.groups[g]
    i = group.instance
    instance = state.instances[i]
    if instance.state == GONE:
        return
    kept = 0
    for k in range(group.first_run, group.first_run + group.size):
        s = state.running[k]
        if _advance(state, s, i):
            _leave(state, s, i)
        else:
            state.running[group.first_run + kept] = s
            kept += 1
    group.size = kept
    instance.kv_peak = max(instance.kv_peak, instance.kv_used)
    _next_step(state, g)
    _wake(state, i, True)  # noqa: FBT003
    _release_if_drained(state, i)


@_compiled
def _next_step(state: State, g: int) -> None:
    """Start over at once if the first stage is free, else when it is."""
    group = state.groups[g]
    instance = state.instances[group.instance]
    free_at = state.stages[instance.first_stage].free_at
    if free_at <= state.clock[0].now:
        _start_step(state, g)
    else:
        group.state = SCHEDULED
        push_event(state, free_at, GROUP_START, g, 0, 0.0)


@_compiled
def _group_start(state: State, g: int) -> None:
    """Start a scheduled group unless its instance is gone or the first stage was taken meanwhile."""
    if state.groups[g].state == SCHEDULED and state.instances[state.groups[g].instance].state != GONE:
        _next_step(state, g)
        _release_if_drained(state, state.groups[g].instance)


@_compiled
def _release_if_drained(state: State, i: int) -> None:
    instance = state.instances[i]
    empty = instance.running == 0 and instance.queued == 0 and instance.in_transfer == 0
    if instance.state == DRAINING and empty:
        instance.state = GONE
        instance.released_at = state.clock[0].now


@_compiled
def _lose(state: State, i: int) -> None:
    """The instance loses a node: all it held starts over elsewhere."""
    instance = state.instances[i]
    if instance.state == GONE:
        return
    instance.state = GONE
    instance.released_at = state.clock[0].now
    for g in range(instance.first_group, instance.first_group + instance.num_groups):
        group = state.groups[g]
        size = group.size
        group.size, group.state = 0, IDLE
        for k in range(group.first_run, group.first_run + size):
            _retry(state, state.running[k])
    while instance.queued > 0:
        _retry(state, _dequeue(state, i))
    instance.running, instance.kv_used = 0, 0.0


@_compiled
def _control(state: State, i: int, action: int, value: float) -> None:
    if action == SET_ADMITTED:
        state.models[i].admit_share = value
        return
    instance = state.instances[i]
    if action == SET_WEIGHT:
        instance.weight = value
    elif action == MAKE_READY and instance.state == ABSENT:
        instance.state = ACTIVE
    elif action == DRAIN and instance.state in (ABSENT, ACTIVE):
        instance.state = DRAINING
        _release_if_drained(state, i)
    elif action == LOSE:
        _lose(state, i)


@_compiled
def _handle_top(state: State) -> None:
    top = state.heap[0]
    kind, a, b, x = top.kind, top.a, top.b, top.x
    state.clock[0].now = top.time
    _drop_top(state)
    state.clock[0].num_events += 1
    if kind == STEP_END:
        _step_end(state, a)
    elif kind == GROUP_START:
        _group_start(state, a)
    elif kind == TRANSFER_END:
        _transfer_end(state, a, b)
    elif kind == CONTROL:
        _control(state, a, b, x)


@_compiled
def _room_in_out(state: State) -> bool:
    """One event can end at most every request in flight, plus the one that arrives."""
    clock = state.clock[0]
    return bool(len(state.out) - clock.out_size > clock.in_flight + 1)


@_compiled
def _comes_before_arrival(event: Any, time: float) -> bool:
    """At equal times requests arrive after ends and controls and before the next batch is formed."""
    return bool(event.time < time or (event.time == time and event.kind < GROUP_START))


@_entry_point
def run_arrivals(state: State, arrivals: Records, first_row: int, first_index: int) -> int:
    """Feed ``arrivals[first_row:]`` into the loop; returns the row at which it stopped.

    Stops at the end, when ``out`` must be emptied, or with too many in flight; ``clock.status`` says which.
    ``first_index``: number of ``arrivals[0]`` in the whole trace.
    """
    clock = state.clock[0]
    clock.status = CONTINUE
    row = first_row
    while row < len(arrivals):
        if not _room_in_out(state):
            clock.status = OUT_IS_FULL
            return row
        time = arrivals[row].time
        if clock.heap_size > 0 and _comes_before_arrival(state.heap[0], time):
            _handle_top(state)
            continue
        if clock.free_slot < 0:
            clock.status = TOO_MANY_IN_FLIGHT
            return row
        clock.now = time
        _arrive(state, first_index + row, arrivals, row)
        row += 1
    return row


@_entry_point
def run_until(state: State, until: float) -> None:
    """Handle every event up to ``until``; ``clock.status`` is OUT_IS_FULL if it must be called again."""
    clock = state.clock[0]
    clock.status = CONTINUE
    while clock.heap_size > 0 and state.heap[0].time <= until:
        if not _room_in_out(state):
            clock.status = OUT_IS_FULL
            return
        _handle_top(state)


@_entry_point
def end_unfinished(state: State) -> None:
    """Write a record for every request still in flight, in slot order."""
    for s in range(len(state.slots)):
        if state.slots[s].used:
            _end_request(state, s, _UNFINISHED)
