"""Trace files, price files and fits of ``coral simulate``."""

import gzip

import numpy as np
import pandas as pd
import pytest

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed
from coral_tasks.domain.names import Market
from coral_tasks.simulation.state import OUT
from coral_tasks.tasks.simulating import (
    RequestRows,
    SimulationRequest,
    fit_line,
    read_price_list,
    read_request_trace,
    timing_source,
)

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles the event loop

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
OWN = "arrival_s,model,prompt_tokens,output_tokens\n"
PRICES = "region,configuration,market,price_usd_per_hour\n"


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_azure_trace_is_read_with_its_model(tmp_path):
    """Times become seconds from the first request, to 100 ns, whether compressed or not."""
    rows = AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    for name in ("t.csv", "t.csv.gz"):
        trace = read_request_trace(write(tmp_path / name, rows), "m")
        assert trace.models == ("m",)
        assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.314579])
        assert trace.prompt_tokens.tolist() == [374, 396]
        assert trace.output_tokens.tolist() == [44, 109]


def test_own_columns_carry_the_model(tmp_path):
    """A file with arrival_s and model needs no model, and a model picks its rows."""
    path = write(tmp_path / "t.csv", "arrival_s,model,prompt_tokens,output_tokens\n0,a,1,2\n1,b,3,4\n2,a,5,6\n")
    assert read_request_trace(path).models == ("a", "b")
    assert read_request_trace(path, "a").prompt_tokens.tolist() == [1, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "2023-11-16 18:00:02,1,1\n2023-11-16 18:00:01,1,1\n", r"request 1: arrival_s must not fall"),
        (AZURE + "2023-11-16 18:00:02,0,1\n", r"request 0: prompt_tokens must be at least 1"),
        (AZURE + "2023-11-16 18:00:02,1,0\n", r"output_tokens must be at least 1"),
        (AZURE + "2023-11-16 18:00:02,99999999,1\n", r"prompt_tokens must be at most 1000000"),
        (AZURE + "2023-11-16 18:00:02,x,1\n", r"request 0: ContextTokens must be a whole number .found x"),
        (AZURE + "2023-11-16 18:00:02,1,1.5\n", r"request 0: GeneratedTokens must be a whole number .found 1.5"),
        (AZURE + "2023-11-16 18:00:02,True,1\n", r"ContextTokens must be a whole number .found True"),
        (AZURE + "2023-11-16 18:00:02,,1\n" * 12, r"ContextTokens must be a whole number .found 12 requests in all"),
        (AZURE + "2023-11-16 18:00:02,x,0\n", r"found x.\n.*output_tokens must be at least 1"),
        (AZURE + "2023-11-16 18:00:02,1,1\n2053-11-16 18:00:02,1,1\n", r"request 1: arrival_s counts seconds"),
        (OWN + "0,,1,1\n", r"request 0: model must be named .1 requests without"),
        (OWN + "0,a,1,1\n1,b,1,1\n", r"no request of this model in the file; it has: a, b .found m"),
        (OWN + "1700000000,m,1,1\n", r"arrival_s counts seconds from the start, at most 100000000"),
        (AZURE + "yesterday,1,1\n", r"arrival_s must be finite"),
        (AZURE, r"t.csv: the trace is empty"),
        ("", r"t.csv: the file is empty"),
        ("a,b\n1,2\n", r"missing: arrival_s, model, prompt_tokens, output_tokens"),
    ],
)
def test_broken_traces_are_refused_by_file_row_and_rule(tmp_path, text, message):
    """Each kind of broken trace has its message, never a traceback."""
    with pytest.raises(ValidationFailed, match=message):
        read_request_trace(write(tmp_path / "t.csv", text), "m")


def test_azure_trace_without_a_model_is_refused(tmp_path):
    """Without MODEL= it is not known whose requests an Azure trace holds."""
    with pytest.raises(ValidationFailed, match="MODEL=FILE"):
        read_request_trace(write(tmp_path / "t.csv", AZURE + "2023-11-16 18:00:02,1,1\n"))


def test_missing_and_truncated_files_are_faults(tmp_path):
    """A file that is not there or not whole is a storage fault with its path."""
    with pytest.raises(StorageFault, match=r"none\.csv"):
        read_request_trace(tmp_path / "none.csv", "m")
    broken = tmp_path / "t.parquet"
    broken.write_bytes(b"PAR1 but no more")
    with pytest.raises(StorageFault, match=r"t\.parquet"):
        read_request_trace(broken, "m")


def test_prices_by_region_configuration_and_market(tmp_path):
    """A price file becomes a mapping by region, configuration and market."""
    path = tmp_path / "p.csv"
    row = {"region": "r", "configuration": "L4x1", "market": "on_demand", "price_usd_per_hour": 0.8}
    pd.DataFrame([row]).to_csv(path, index=False)
    assert read_price_list(path) == {("r", "L4x1", Market.ON_DEMAND): 0.8}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("r,L4x1,weekly,1\n", r"row 0 r L4x1 weekly: unknown market; known: on_demand, reserved, spot .found weekly"),
        ("r,L4x1,spot,cheap\n", r"price must be a number of at least 0 .found cheap"),
        ("r,L4x1,spot,\n", r"price must be a number of at least 0 .found nan"),
        ("r,L4x1,spot,-1\n", r"price must be a number of at least 0"),
        ("r,L4x1,spot,inf\n", r"price must be a number of at least 0"),
        ("r,L4x1,spot,1\nr,L4x1,spot,2\n", r"row 1 r L4x1 spot: listed twice"),
    ],
)
def test_bad_prices_are_refused_by_row_and_rule(tmp_path, rows, message):
    """Each kind of bad price has its message; none is read as free or dropped."""
    with pytest.raises(ValidationFailed, match=message):
        read_price_list(write(tmp_path / "p.csv", PRICES + rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"requests_per_s": rate}, "rate must be finite and above zero") for rate in (0.0, -1.0, np.nan, np.inf)),
        *(({"slowdown": factor}, "slowdown must be finite and above zero") for factor in (0.0, -1.0, np.nan, np.inf)),
    ],
)
def test_numbers_without_sense_are_refused_by_name(tmp_path, changes, message):
    """A rate or a slowdown that is not above zero and finite is refused before anything is read."""
    with pytest.raises(ValidationFailed, match=message):
        SimulationRequest(plan=tmp_path / "none.json", traces=(), **changes)


def test_output_that_cannot_be_written_is_said(tmp_path):
    """A folder as output is refused at once; a place that cannot be made is a fault with its path."""
    with pytest.raises(ValidationFailed, match="--out is a folder, it must be a file"):
        SimulationRequest(plan=tmp_path / "none.json", traces=(), out=tmp_path)
    rows = RequestRows(models=("m",))
    rows(np.zeros(1, dtype=OUT))
    with pytest.raises(StorageFault, match=r"rows.parquet cannot be written"):
        rows.write(write(tmp_path / "file", "") / "rows.parquet")


def test_fit_finds_an_exact_line_and_never_goes_negative():
    """Points on a line give it back; a constant or slope that would be negative becomes 0."""
    units = np.array([1.0, 10.0, 100.0])
    assert fit_line(units, 0.5 + 0.02 * units) == pytest.approx((0.5, 0.02))
    assert fit_line(units, np.array([0.001, 0.2, 10.0]))[0] == 0.0
    assert fit_line(units, np.array([3.0, 2.0, 1.0]))[1] == 0.0


def test_unknown_timing_source_lists_the_known_ones():
    """A wrong --timing names profile and promise."""
    with pytest.raises(UnknownName, match="profile, promise"):
        timing_source(None, "guess")
