"""CPU seconds of the page in Airflow's UI: 1,000 instances, 50 models, 300 runs; first look and later ones.

Run: ``python benchmarks/bench_page.py``. The target is under 2 s; nothing here asserts it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
from made_home import Size, make_home

from coral_tasks.reporting import dashboard
from coral_tasks.settings import Settings
from coral_tasks.tasks import views

SIZE = Size(models=50, instances=1000, runs=300)


def timed[T](label: str, work: Callable[[], T]) -> T:
    start = time.process_time()
    result = work()
    print(f"{label:<44}{time.process_time() - start:8.3f} CPU-s")
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder))
        make_home(settings.home, Size(models=1, instances=1, runs=1))
        timed("libraries, first look at a tiny folder", lambda: views.overview(settings))
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder))
        make_home(settings.home, SIZE)
        values = timed(f"values, nothing read before, {SIZE.runs} runs", lambda: views.overview(settings))
        values = timed("values, again", lambda: views.overview(settings))
        document = timed("HTML", lambda: dashboard.overview_page(values))
        print(f"{SIZE.instances} instances, {SIZE.models} models: {len(document) / 1e6:.2f} MB of HTML")


if __name__ == "__main__":
    main()
