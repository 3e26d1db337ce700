"""The catalogue's figures and its refusal of broken files."""

from __future__ import annotations

import csv
import random
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coral_tasks.catalog import PriceRule, load_catalog
from coral_tasks.catalog.carry import fill_size, listed_aws, listed_gcp
from coral_tasks.catalog.catalog import DATA_FOLDER
from coral_tasks.catalog.tables import attention_kinds
from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed
from coral_tasks.domain.hardware import IntraNodeLink
from coral_tasks.domain.models import AttentionKind
from coral_tasks.domain.names import Market


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the data files that a test may break."""
    return Path(shutil.copytree(DATA_FOLDER, tmp_path / "data"))


def edit(folder: Path, name: str, old: str, new: str) -> None:
    """Replace text in a data file; the text must be there."""
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize("name", ["T4", "A10G", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200"])
def test_every_gpu_type_has_a_configuration_of_each_size(name: str) -> None:
    """Each GPU type stands in nodes of 1, 2, 4 and 8, and a node's memory is that of its cards."""
    catalog = load_catalog()
    for count in (1, 2, 4, 8):
        node = catalog.configuration(f"{name}x{count}")
        assert node.memory_bytes == count * catalog.gpu_type(name).memory_bytes


def test_figures_of_one_card_are_carried_in_base_units() -> None:
    """An L40S has 44.7 GiB, 362.05 TFLOP/s, 864 GB/s and no NVLink."""
    card = load_catalog().gpu_type("L40S")
    assert card.memory_bytes == round(44.7 * 2**30)
    assert card.flops_per_s == pytest.approx(362.05e12)
    assert card.memory_bandwidth_bytes_per_s == pytest.approx(864e9)
    assert card.nvlink_bytes_per_s is None


def test_a_configuration_takes_the_slowest_network_of_its_machines() -> None:
    """H100x8 is sold with 3200 Gbps (p5) and 1000 Gbps (a3): planning counts on 1000."""
    node = load_catalog().configuration("H100x8")
    assert node.network_bytes_per_s == pytest.approx(1000e9 / 8)
    assert node.intra_node_link is IntraNodeLink.NVLINK


def test_a_machine_without_gpu_is_named_cpu() -> None:
    """The configuration of a machine without GPU is called cpu, without a count."""
    assert load_catalog().configuration("cpu").id == "cpu"


def test_hybrid_models_alternate_sliding_and_full_layers() -> None:
    """GPT-OSS starts with a sliding layer and has half of them; every sixth layer of Gemma 3 is full, 10 of 62."""
    catalog = load_catalog()
    kinds = catalog.model("gpt-oss-20b").attention_kinds
    assert kinds[:3] == (AttentionKind.SLIDING, AttentionKind.FULL, AttentionKind.SLIDING)
    assert kinds.count(AttentionKind.SLIDING) == 12
    assert catalog.model("gemma-3-27b").attention_kinds.count(AttentionKind.FULL) == 10
    assert attention_kinds("full", 3) == (AttentionKind.FULL,) * 3


def test_checkpoint_sizes_are_those_published() -> None:
    """Qwen3-32B in BF16 is 65.52 GB, GPT-OSS 20B 12.8 GiB, DeepSeek-V3 in FP8 671 GB."""
    catalog = load_catalog()
    sizes = {name: catalog.model(name).checkpoint_bytes for name in ("qwen3-32b", "gpt-oss-20b", "deepseek-v3")}
    assert sizes["qwen3-32b"] == pytest.approx(65.52e9)
    assert sizes["gpt-oss-20b"] == pytest.approx(12.8 * 2**30, rel=1e-4)
    assert sizes["deepseek-v3"] == pytest.approx(671e9)


def test_setups_are_those_of_the_design() -> None:
    """Core: 3 models, 12 configurations, 2 regions, 10 requests/s; extended: 6, 20, 3, 25."""
    catalog = load_catalog()
    shapes = {
        name: (
            len(setup.models),
            len(setup.configurations),
            len(setup.regions),
            {entry.requests_per_s for entry in setup.models},
        )
        for name, setup in catalog.setups.items()
    }
    assert shapes["core"] == (3, 12, 2, {10.0})
    assert shapes["extended"] == (6, 20, 3, {25.0})


def test_limits_and_shape_of_one_model() -> None:
    """Phi-4 must meet 1.2 s to the first token and 60 ms per token on conversations of 1154.7 and 211.1 tokens."""
    model, slo, shape, _ = load_catalog().setup("extended").models[0]
    assert model.id == "phi-4-14b"
    assert (slo.ttft_s, slo.tpot_s) == (1.2, 0.06)
    assert (shape.mean_prompt_tokens, shape.mean_output_tokens) == (1154.7, 211.1)


@pytest.mark.parametrize("kind", ["gpu_type", "configuration", "model", "setup", "machine_type"])
def test_an_unknown_name_lists_the_known_ones(kind: str) -> None:
    """Each look-up refuses an unknown name and lists what it knows."""
    catalog = load_catalog()
    known = {
        "gpu_type": "L40S",
        "configuration": "L40Sx4",
        "model": "qwen3-32b",
        "setup": "core",
        "machine_type": "g6e.xlarge",
    }
    with pytest.raises(UnknownName, match=known[kind]):
        getattr(catalog, kind)("L5")


def test_listed_prices_are_the_lists_own() -> None:
    """L40Sx4 in us-east-2 is g6e.12xlarge at 10.49264 on demand, and 2.8567 in the cheapest spot zone."""
    catalog = load_catalog()
    prices = {
        price.market: price
        for price in catalog.prices(catalog.setup("core"))
        if price.region == "aws/us-east-2" and price.configuration == "L40Sx4"
    }
    assert prices[Market.ON_DEMAND].price_usd_per_hour == 10.49264
    assert prices[Market.SPOT].price_usd_per_hour == 2.8567
    assert prices[Market.ON_DEMAND].rule is PriceRule.LISTED


def test_a_size_between_two_sold_ones_lies_between_their_prices_per_gpu() -> None:
    """AWS sells L40S by 1 and 4: the price of two is twice the mean of 1.861 and 10.49264 / 4."""
    catalog = load_catalog()
    price = next(
        one
        for one in catalog.prices(catalog.setup("core"))
        if (one.region, one.configuration, one.market) == ("aws/us-east-2", "L40Sx2", Market.ON_DEMAND)
    )
    assert price.price_usd_per_hour == pytest.approx(1.861 + 10.49264 / 4, abs=1e-5)
    assert price.rule is PriceRule.INTERPOLATED


def test_a_size_below_all_sold_ones_costs_their_share() -> None:
    """A type sold only by eight costs an eighth per GPU, and says so."""
    filled = fill_size(2, {8: (21.6, "p4d.24xlarge", PriceRule.LISTED, "list")})
    assert filled == (pytest.approx(5.4), "p4d.24xlarge", PriceRule.NEAREST_SIZE, "list")


def test_an_unusable_figure_is_replaced_by_the_neighbours_or_absent() -> None:
    """H100 on demand in us-central1 is flagged: us-east4's figure stands in; elsewhere there is no row."""
    row = {"instance_type": "a3-highgpu-8g", "spot_usd_per_hour": "20"}
    listed = listed_gcp(
        [
            row | {"region": "us-east4", "on_demand_usd_per_hour": "87.83"},
            row | {"region": "us-central1", "on_demand_usd_per_hour": ""},
            row | {"region": "europe-west4", "on_demand_usd_per_hour": ""},
        ]
    )
    assert listed["gcp/us-central1", "on_demand", "a3-highgpu-8g"][:2] == (87.83, PriceRule.NEIGHBOUR_REGION)
    assert ("gcp/europe-west4", "on_demand", "a3-highgpu-8g") not in listed
    assert listed["gcp/europe-west4", "spot", "a3-highgpu-8g"][0] == 20


def test_a_capped_or_blank_spot_price_is_no_pool() -> None:
    """Spot at the on-demand price, or blank, gives no spot row; the cheapest zone with a pool does."""
    row = {"instance_type": "p5.48xlarge", "region": "us-east-2", "on_demand_usd_per_hour": "55.04"}
    listed = listed_aws([row | {"spot_usd_per_hour": text} for text in ("55.04", "", "12.5", "11.5")])
    assert listed["aws/us-east-2", "spot", "p5.48xlarge"][0] == 11.5
    assert ("aws/us-east-2", "spot", "p5.48xlarge") not in listed_aws([row | {"spot_usd_per_hour": "55.04"}])


def test_no_price_is_zero_and_spot_is_below_on_demand() -> None:
    """Unknown is absent: every price is positive, and no spot price exceeds its on-demand price."""
    prices = {(one.region, one.configuration, one.market): one.price_usd_per_hour for one in load_catalog().all_prices}
    assert min(prices.values()) > 0
    for (region, configuration, market), price in prices.items():
        if market is Market.SPOT and (region, configuration, Market.ON_DEMAND) in prices:
            assert price <= prices[region, configuration, Market.ON_DEMAND]


def test_a_catalogue_price_becomes_planning_input() -> None:
    """The price keeps region, configuration, market and figure; the caller gives the time."""
    price = load_catalog().all_prices[0]
    node_price = price.as_node_price(datetime(2026, 1, 1, tzinfo=UTC))
    assert (node_price.region, node_price.price_usd_per_hour) == (price.region, price.price_usd_per_hour)


@pytest.mark.parametrize(
    "name",
    [
        *("gpu_types.csv", "machine_types.csv", "node_configurations.csv", "models.csv"),
        *("slos.csv", "request_shapes.csv", "node_prices.csv", "setups.csv"),
    ],
)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    """A missing data file is a storage fault that names the file."""
    (folder / name).unlink()
    with pytest.raises(StorageFault, match=name):
        load_catalog(folder)


def test_an_unreadable_file_is_named(folder: Path) -> None:
    """Bytes that are no UTF-8 text are a storage fault that names the file."""
    (folder / "models.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StorageFault, match=r"models\.csv"):
        load_catalog(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("gpu_types.csv", "L40S,44.7,", "L40S,many,", r"gpu_types\.csv, line \d+: memory_gib must be a finite number"),
        ("gpu_types.csv", "L40S,44.7,", "L40S,nan,", "memory_gib must be a finite number"),
        ("gpu_types.csv", "L40S,44.7,", "L40S,-1,", "memory_gib must be a finite number above zero"),
        ("gpu_types.csv", "gpu,memory_gib", "card,memory_gib", "columns must be gpu, memory_gib"),
        ("machine_types.csv", ",L40S,", ",L50,", "gpu must be one of"),
        ("models.csv", "qwen3-32b,Qwen/Qwen3-32B,64,", "qwen3-32b,Qwen/Qwen3-32B,6.5,", "num_layers must be a whole"),
        ("models.csv", "sliding_full,128", "sliding_full,", "sliding layers need window_tokens"),
        ("models.csv", "phi-4-14b,", "qwen3-32b,", "repeats line"),
        ("slos.csv", "phi-4-14b,1200", "phi-5,1200", "model must be one of"),
        ("slos.csv", "1200,60,99", "1200,60,199", "percentile must be at most 100"),
        ("node_prices.csv", ",on_demand,", ",reserved,", "market must be one of"),
        ("node_prices.csv", ",listed,", ",guessed,", "rule must be one of"),
        ("setups.csv", "core,model,qwen3-32b", "core,model,qwen4", "name must be one of"),
        ("setups.csv", "core,model,qwen3-32b,10,", "core,model,qwen3-32b,,", "requests_per_s must be a finite number"),
        ("setups.csv", "core,region,aws/us-east-2", "core,region,aws/moon", "name must be one of"),
    ],
)
def test_a_broken_cell_is_named_with_file_row_and_rule(
    folder: Path, name: str, old: str, new: str, message: str
) -> None:
    """A broken cell is refused with file, line and the rule it breaks."""
    edit(folder, name, old, new)
    with pytest.raises(ValidationFailed, match=message) as failure:
        load_catalog(folder)
    assert failure.value.violations[0].table == name


def test_all_broken_rows_are_reported_together(folder: Path) -> None:
    """Two broken rows give two violations, not only the first."""
    edit(folder, "gpu_types.csv", "L40S,44.7,", "L40S,zero,")
    edit(folder, "gpu_types.csv", "H200,141,", "H200,zero,")
    with pytest.raises(ValidationFailed) as failure:
        load_catalog(folder)
    assert len(failure.value.violations) == 2


@pytest.mark.parametrize("text", ["", "gpu,memory_gib\n"])
def test_an_empty_file_is_refused(folder: Path, text: str) -> None:
    """A file without header or without the right one is refused by name."""
    (folder / "gpu_types.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValidationFailed, match=r"gpu_types\.csv"):
        load_catalog(folder)


def test_a_row_of_the_wrong_width_is_refused(folder: Path) -> None:
    """A row with a cell too few is refused with its line."""
    edit(folder, "slos.csv", "phi-4-14b,1200,60,99,", "phi-4-14b,1200,60,")
    with pytest.raises(ValidationFailed, match="line 2: must have 5 cells"):
        load_catalog(folder)


def test_a_byte_order_mark_is_no_part_of_the_first_column(folder: Path) -> None:
    """Spreadsheets put one in front of the header."""
    path = folder / "models.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_catalog(folder).models == load_catalog().models


def test_a_cell_longer_than_any_reader_takes_is_named(folder: Path) -> None:
    """The csv module's own refusal becomes a fault that names the file."""
    path = folder / "models.csv"
    path.write_bytes(path.read_bytes() + b"x" * 200_000)
    # The limit belongs to the whole process, and the gate's reader raises it.
    before = csv.field_size_limit(131_072)
    try:
        with pytest.raises(StorageFault, match=r"catalogue file models\.csv cannot be read: field larger"):
            load_catalog(folder)
    finally:
        csv.field_size_limit(before)


def test_no_mutation_of_a_file_gives_anything_but_a_refusal(folder: Path) -> None:
    """One broken cell, line or header in any file: the catalogue loads or names what is wrong, nothing else."""
    chance = random.Random(1)
    junk = ["nan", "inf", "-1", "0", "1e400", "", "x", '"', "\x00", "\u2028", "\ufeff", "1.5", ",", "\r"]
    refused = 0
    for _ in range(60):
        path = chance.choice(sorted(folder.glob("*.csv")))
        whole = path.read_text(encoding="utf-8")
        place = chance.randrange(len(whole))
        tail = chance.choice([whole[place:], whole[place + 1 :], "", whole[place:] + whole[:place]])
        path.write_text(whole[:place] + chance.choice(junk) + tail, encoding="utf-8")
        try:
            load_catalog.__wrapped__(folder)
        except (ValidationFailed, StorageFault) as refusal:
            refused += ".csv" in str(refusal)
        path.write_text(whole, encoding="utf-8")
    assert refused > 30
