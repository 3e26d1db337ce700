"""Pipelines whose stages batch for themselves, against times worked out by hand and laws that always hold."""

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.simulation.stagewise import SelfBatchingStage, run_stagewise


def stage(*, prompt=2.0, step=1.0, per_step=0.0, **more):
    """A worker that takes ``prompt`` seconds for any batch of prompts and ``step`` for any batch of steps."""
    return SelfBatchingStage(prompt_s=lambda _: prompt, decode_s=lambda count: step + per_step * count, **more)


def run(stages, arrivals, prompt, output, in_flight=None):
    return run_stagewise(stages, np.array(arrivals, float), np.array(prompt), np.array(output), in_flight)


def test_a_lone_request_passes_every_stage_for_each_token():
    """Two stages: a prompt takes 2 + 2 s, each of two later tokens 1 + 1 s, and 0.1 s a token on both links."""
    rows = run([stage(token_s=0.1)] * 2, [5.0], [4], [3])
    assert rows["first"].tolist() == pytest.approx([5 + 2 * (2 + 0.4)])
    assert rows["finish"].tolist() == pytest.approx([5 + 2 * 2.4 + 2 * 2 * 1.1])


def test_what_waits_is_one_batch_and_prompts_go_before_the_steps_that_wait_with_them():
    """One stage: A's prompt ends at 2, its step runs to 3; B and C, come at 2.5, go together from 3 to 5.

    A's second step waits from 3 with them: it runs after their batch, from 5 to 6; then B's and C's first steps, which
    came at 5 while A's ran, go as one batch from 6 to 7.
    """
    rows = run([stage()], [0.0, 2.5, 2.5], [1, 1, 1], [3, 2, 2])
    assert rows["first"].tolist() == pytest.approx([2.0, 5.0, 5.0])
    assert rows["finish"].tolist() == pytest.approx([6.0, 7.0, 7.0])


def test_a_prompt_waits_for_room_until_a_request_ends():
    """Room for 10 tokens: A (8 prompt tokens) ends at 4, and B, which would need 8 more, begins only then."""
    rows = run([stage(capacity_tokens=10)], [0.0, 0.0], [8, 8], [3, 1])
    assert rows["finish"].tolist() == pytest.approx([4.0, 6.0])


def test_a_prompt_larger_than_the_room_still_runs_alone():
    """Nothing is held, so a prompt of 50 tokens is not kept waiting for ever by a room of 10."""
    assert run([stage(capacity_tokens=10)], [0.0], [50], [1])["finish"].tolist() == pytest.approx([2.0])


def test_a_closed_loop_brings_the_next_request_when_one_ends():
    """One in flight, each 2 s: the k-th arrives when the one before ends."""
    rows = run([stage()], [0.0, 0.0, 0.0], [1, 1, 1], [1, 1, 1], in_flight=1)
    assert rows["arrival"].tolist() == pytest.approx([0.0, 2.0, 4.0])
    assert rows["finish"].tolist() == pytest.approx([2.0, 4.0, 6.0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("in_flight", [None, 7])
def test_every_request_ends_and_no_token_comes_faster_than_the_stages(seed, in_flight):
    """With little room and mixed lengths all end, arrival before first before finish, at least the bare work's time."""
    random = np.random.default_rng(seed)
    prompt, output = random.integers(1, 40, 60), random.integers(1, 20, 60)
    stages = [stage(prompt=0.3, step=0.1, per_step=0.02, capacity_tokens=150), stage(prompt=0.1, step=0.2)]
    arrivals = np.zeros(60) if in_flight else np.cumsum(random.exponential(1.0, 60))
    rows = run(stages, arrivals, prompt, output, in_flight)
    assert ((rows["first"] - rows["arrival"]) >= 0.4 - 1e-9).all()
    assert ((rows["finish"] - rows["first"]) >= (output - 1) * 0.32 - 1e-9).all()
    if in_flight:
        begun = np.searchsorted(np.sort(rows["arrival"]), rows["finish"], side="left")
        ended = np.searchsorted(np.sort(rows["finish"]), rows["finish"], side="left")
        assert (begun - ended).max() <= in_flight
    assert (run(stages, arrivals, prompt, output, in_flight) == rows).all()


def test_no_stage_or_an_empty_prompt_is_refused():
    """A pipeline needs a stage, and every request at least one token each way."""
    with pytest.raises(ValidationFailed, match="needs a stage"):
        run([], [0.0], [1], [1])
    with pytest.raises(ValidationFailed, match="one token or more"):
        run([stage()], [0.0], [0], [1])
