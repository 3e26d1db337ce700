"""Carry figures from the collected public sources into the catalogue's files: ``python -m coral_tasks.catalog.carry``.

Owns the rules by which cells that no provider lists are filled (see PriceRule). Run by hand when the collected
figures change; nothing imports it at run time. Dimensions, limits and shapes that stand in no collected file are in
this module, each with its source.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from coral_tasks.catalog.catalog import DATA_FOLDER
from coral_tasks.catalog.prices import PRICE_COLUMNS, PriceRule
from coral_tasks.catalog.tables import CONFIGURATION_COLUMNS, GPU_COLUMNS, MACHINE_COLUMNS, MODEL_COLUMNS

SIZES = (1, 2, 4, 8)
SHORT_GPU = {
    "A100-40GB-SXM": "A100-40GB",
    "A100-80GB-SXM": "A100-80GB",
    "H100-80GB-SXM": "H100",
    "H200-141GB": "H200",
}
T4_USABLE = "; memory entered as the usable 15 GiB (ECC), not the nominal 16"
EXTRA_GPUS = (
    (
        "V100,16,125,,900,150,16,Volta,NVIDIA V100 SXM2 16 GB datasheet (FP16 tensor; no BF16; links one way); "
        "for validation against Helix only"
    ),
    "cpu,16,1,,50,,16,cpu,A machine without GPU: nominal figures. Only measured profiles are ever used for it",
)
AWS_SOURCE = "skypilot-catalog aws vms.csv 00148f2"
GCP_SOURCE = "skypilot-catalog gcp vms.csv 006059e"
USABLE_NEIGHBOUR = {"us-central1": "us-east4", "us-west1": "us-central1"}
"""Region whose on-demand figure stands in where the collected one is unusable: same country, same price band. For
a3-highgpu-8g in us-central1 this gives 87.83, beside 88.49 in a public price file of 2026-09 (SOURCES.md)."""

# hub name -> id, attention, latent_dim, tied, dense layers, shared experts, dense and expert bytes per parameter,
# checkpoint GB (None: parameters x bytes). MXFP4: 4-bit values and one 8-bit scale per 32 (OCP MX), 0.53125 bytes.
TINY = "a toy of the project's own for machines without GPU: 8 layers and 1.4 million parameters"
MODEL_EXTRAS: dict[str, tuple[str, str, str, str, int, int, float, float, float | None]] = {
    "microsoft/phi-4": ("phi-4-14b", "full", "", "false", 0, 0, 2, 2, None),
    "openai/gpt-oss-20b": ("gpt-oss-20b", "sliding_full", "", "false", 0, 0, 2, 0.53125, 12.8 * 1.073741824),
    "Qwen/Qwen3-32B": ("qwen3-32b", "full", "", "false", 0, 0, 2, 2, None),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama3-70b", "full", "", "false", 0, 0, 2, 2, None),
    "openai/gpt-oss-120b": ("gpt-oss-120b", "sliding_full", "", "false", 0, 0, 2, 0.53125, 60.8 * 1.073741824),
    "Qwen/Qwen3-235B-A22B": ("qwen3-235b", "full", "", "false", 0, 0, 2, 2, None),
    "Qwen/Qwen3-14B": ("qwen3-14b", "full", "", "false", 0, 0, 2, 2, None),
    "Qwen/Qwen3-30B-A3B": ("qwen3-30b-a3b", "full", "", "false", 0, 0, 2, 2, None),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3-8b", "full", "", "false", 0, 0, 2, 2, None),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", "mla", "576", "false", 3, 1, 1, 1, None),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", "full", "", "false", 0, 0, 2, 2, None),
    "google/gemma-3-27b-it": ("gemma-3-27b", "five_sliding_one_full", "", "true", 0, 0, 2, 2, None),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("qwen2.5-coder-32b", "full", "", "false", 0, 0, 2, 2, None),
}
EXTRA_MODELS = (
    f"tiny,coral/tiny,8,128,2,2,64,256,512,false,,,,,,full,,,0.001441792,0.001441792,2,2,2,0.002883584,4096,{TINY}",
    (
        "llama1-30b,huggyllama/llama-30b,60,6656,52,52,128,17920,32000,false,,,,,,full,,,32.53,32.53,2,2,2,65.06,2048,"
        "LLaMA (arXiv 2302.13971) table 2; parameters recomputed from the dimensions; for validation against Helix"
    ),
    (
        "llama2-70b,meta-llama/Llama-2-70b-hf,80,8192,64,8,128,28672,32000,false,,,,,,full,,,68.98,68.98,2,2,2,137.96,"
        "4096,Llama 2 (arXiv 2307.09288); parameters recomputed from the dimensions; for validation against Helix"
    ),
)


def carry(collected: Path, target: Path = DATA_FOLDER) -> None:
    """Rewrite gpu_types, machine_types, node_configurations, models and node_prices in ``target``.

    ``collected``: folder with the collected CSV files and their SOURCES.md.
    """
    machines = list(machine_rows(_rows(collected / "instance_types.csv")))
    _write(target / "gpu_types.csv", GPU_COLUMNS, gpu_rows(_rows(collected / "gpu_types.csv")), EXTRA_GPUS)
    _write(target / "machine_types.csv", MACHINE_COLUMNS, machines)
    _write(target / "node_configurations.csv", CONFIGURATION_COLUMNS, configuration_rows(machines))
    _write(target / "models.csv", MODEL_COLUMNS, model_rows(_rows(collected / "models.csv")), EXTRA_MODELS)
    prices = [
        *price_rows(listed_aws(_rows(collected / "aws_gpu_prices.csv")), machines),
        *price_rows(listed_gcp(_rows(collected / "gcp_gpu_prices.csv")), machines),
        ["local/here", "cpu", "on_demand", 0.1, "cpu", PriceRule.NOMINAL.value, "a machine of one's own; any figure"],
    ]
    _write(target / "node_prices.csv", PRICE_COLUMNS, sorted(prices))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], lines: Sequence[str] = ()) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        file.writelines(f"{line}\n" for line in lines)


def gpu_rows(collected: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    """Rows of gpu_types.csv: short names, T4 with its usable memory."""
    for row in collected:
        values = [row[column] for column in GPU_COLUMNS]
        values[0] = SHORT_GPU.get(row["gpu"], row["gpu"])
        if row["gpu"] == "T4":
            values[1], values[-1] = "15", row["source"] + T4_USABLE
        yield values


def machine_rows(collected: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    """Rows of machine_types.csv."""
    for row in collected:
        gpu = SHORT_GPU.get(row["gpu"], row["gpu"])
        source = "skypilot-catalog (GPUs); vendor pages (network, advertised maximum), see docs of the collection"
        yield [
            row["instance_type"],
            row["cloud"],
            gpu,
            row["gpu_count"],
            row["intra_node_link"],
            row["network_gbps"],
            source,
        ]


def configuration_rows(machines: Sequence[Sequence[str]]) -> Iterator[list[object]]:
    """Rows of node_configurations.csv: every GPU type of the machines x 1, 2, 4, 8, and ``cpu``."""
    for gpu in dict.fromkeys(row[2] for row in machines):
        mine = [row for row in machines if row[2] == gpu]
        for size in SIZES:
            yield _configuration_row(gpu, size, mine)
    yield ["cpu", 1, "pcie", 10, "nominal", "a machine without GPU"]


def _configuration_row(gpu: str, size: int, machines: Sequence[Sequence[str]]) -> list[object]:
    same = [row for row in machines if int(row[3]) == size]
    if same:
        slowest = min(same, key=lambda row: float(row[5]))
        source = " ".join(sorted(row[0] for row in same))
        return [gpu, size, slowest[4], slowest[5], "lowest network of the machine types sold", source]
    smaller = [row for row in machines if int(row[3]) < size]
    if smaller:
        near = max(smaller, key=lambda row: int(row[3]))
        network: float = float(near[5])
        rule = "not sold by any provider here: network of the next smaller size, link of the largest"
    else:
        near = min(machines, key=lambda row: int(row[3]))
        network = float(near[5]) * size / int(near[3])
        rule = "not sold by any provider here: pro rata share of the next larger size's network"
    link = "pcie" if size == 1 else max(machines, key=lambda row: int(row[3]))[4]
    return [gpu, size, link, network, rule, near[0]]


def model_rows(collected: Iterable[Mapping[str, str]]) -> Iterator[list[object]]:
    """Rows of models.csv, in the order of MODEL_EXTRAS (the evaluated models first)."""
    by_name = {row["model"]: row for row in collected}
    for hub_name, extras in MODEL_EXTRAS.items():
        name, attention, latent, tied, dense_layers, shared, width, expert_width, checkpoint = extras
        row = by_name[hub_name]
        experts = row["num_experts"]
        size = checkpoint if checkpoint is not None else float(row["params_total_b"]) * width
        yield [
            name,
            hub_name,
            *(row[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim")),
            row["intermediate_size"] or row["moe_intermediate_size"],
            row["vocab_size"],
            tied,
            *(row[key] for key in ("num_experts", "experts_per_token", "moe_intermediate_size")),
            *((dense_layers or "", shared or "") if experts else ("", "")),
            attention,
            row["sliding_window"],
            latent,
            *(row[key] for key in ("params_total_b", "params_active_b")),
            width,
            expert_width,
            2,
            round(size, 3),
            row["max_context"],
            row["source"],
        ]


Listed = dict[tuple[str, str, str], tuple[float, PriceRule, str]]
"""(region, market, machine type) -> USD per hour, rule, source."""


def listed_aws(collected: Iterable[Mapping[str, str]]) -> Listed:
    """On-demand price and, where there is a pool, the lowest spot price of a region's zones.

    A spot price equal to on-demand is a capped price, its pool effectively absent (SOURCES.md): no row.
    """
    listed: Listed = {}
    for row in collected:
        region, machine = f"aws/{row['region']}", row["instance_type"]
        on_demand, spot = row["on_demand_usd_per_hour"], row["spot_usd_per_hour"]
        if on_demand:
            listed[region, "on_demand", machine] = (float(on_demand), PriceRule.LISTED, AWS_SOURCE)
        if spot and on_demand and float(spot) < float(on_demand):
            before = listed.get((region, "spot", machine), (math.inf, PriceRule.LISTED, ""))[0]
            source = f"{AWS_SOURCE}, cheapest zone with a pool"
            listed[region, "spot", machine] = (min(before, float(spot)), PriceRule.LISTED, source)
    return listed


def listed_gcp(collected: Iterable[Mapping[str, str]]) -> Listed:
    """On-demand and spot; where on-demand is flagged unusable, that of USABLE_NEIGHBOUR, or no row."""
    rows = list(collected)
    usable = {
        (row["region"], row["instance_type"]): float(row["on_demand_usd_per_hour"])
        for row in rows
        if row["on_demand_usd_per_hour"]
    }
    listed: Listed = {}
    for row in rows:
        name, machine = row["region"], row["instance_type"]
        listed[f"gcp/{name}", "spot", machine] = (float(row["spot_usd_per_hour"]), PriceRule.LISTED, GCP_SOURCE)
        neighbour = USABLE_NEIGHBOUR.get(name, "")
        key = f"gcp/{name}", "on_demand", machine
        if (name, machine) in usable:
            listed[key] = (usable[name, machine], PriceRule.LISTED, GCP_SOURCE)
        elif (neighbour, machine) in usable:
            source = f"{GCP_SOURCE}; listed figure flagged on_demand_not_usable, figure of {neighbour}"
            listed[key] = (usable[neighbour, machine], PriceRule.NEIGHBOUR_REGION, source)
    return listed


def price_rows(listed: Listed, machines: Sequence[Sequence[str]]) -> Iterator[list[object]]:
    """Rows of node_prices.csv for one provider: listed sizes as they are, the other sizes of a type sold there filled.

    The largest gap is filled too (a type sold only by eight), since the paper's setups take all sizes.
    Several machine types of one configuration (p5e, p5en): the cheaper.
    """
    size_of = {row[0]: (row[2], int(row[3])) for row in machines}
    cells: dict[tuple[str, str, str], dict[int, tuple[float, str, PriceRule, str]]] = {}
    for (region, market, machine), (price, rule, source) in sorted(listed.items()):
        gpu, size = size_of[machine]
        sizes = cells.setdefault((region, market, gpu), {})
        sizes[size] = min(sizes.get(size, (math.inf, "", rule, "")), (price, machine, rule, source))
    sold = {(region, *size_of[machine]) for region, _, machine in listed}
    for (region, market, gpu), sizes in cells.items():
        for size in SIZES:
            if size in sizes:
                price, machine, rule, source = sizes[size]
            elif (region, gpu, size) in sold:
                continue  # sold there, but not in this market: no spot pool seen, or no on-demand price
            else:
                price, machine, rule, source = fill_size(size, sizes)
            yield [region, f"{gpu}x{size}", market, round(price, 5), machine, rule.value, source]


def fill_size(size: int, sizes: Mapping[int, tuple[float, str, PriceRule, str]]) -> tuple[float, str, PriceRule, str]:
    """Price of a size nobody sells, from the sizes that are sold (count -> price, machine, rule, source)."""
    below, above = (max((n for n in sizes if n < size), default=0), min((n for n in sizes if n > size), default=0))
    if below and above:
        low, high = sizes[below][0] / below, sizes[above][0] / above
        share = math.log2(size / below) / math.log2(above / below)
        machine = f"{sizes[below][1]} {sizes[above][1]}"
        return size * (low + share * (high - low)), machine, PriceRule.INTERPOLATED, sizes[below][3]
    near = below or above
    price, machine, _, source = sizes[near]
    return price / near * size, machine, PriceRule.NEAREST_SIZE, source


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collected", type=Path, help="folder with the collected CSV files")
    carry(parser.parse_args().collected)


if __name__ == "__main__":
    main()
