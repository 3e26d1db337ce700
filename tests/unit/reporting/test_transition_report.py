"""The picture of a transition: the replay is right by hand, the page escapes names and stands alone."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "protocol"))
from fleet_builders import REGION, plan, template

from coral_tasks.dispatch.planner import plan_transition
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.names import InstanceId, Market, ModelId, NodeConfigurationId, NodeId, Phase, PlanId, TemplateId
from coral_tasks.domain.transition import CapacityDip, Step, StepKind, Transition, Unplaced
from coral_tasks.reporting.page import write_page
from coral_tasks.reporting.transition_report import MAX_SINGLE_ROWS, transition_report
from coral_tasks.reporting.transition_rows import Activity, Bar, build_history

EVIL = "<script>alert(1)</script>&"


def _node(name: str) -> Node:
    return Node(id=NodeId(name), region=REGION, configuration=NodeConfigurationId("L4x1"), market=Market.ON_DEMAND)


def _instance(
    name: str, *nodes: str, state: InstanceState = InstanceState.READY, throughput: float | None = 10.0
) -> ServingInstance:
    return ServingInstance(
        id=InstanceId(name),
        template=TemplateId("t"),
        model=ModelId("m"),
        phase=Phase.DECODE,
        region=REGION,
        market=Market.ON_DEMAND,
        state=state,
        stage_nodes=tuple((NodeId(node),) for node in nodes),
        throughput=throughput,
    )


def _fleet(nodes: list[str], *instances: ServingInstance) -> Fleet:
    return Fleet(nodes=tuple(map(_node, nodes)), instances=instances)


def _transition(*steps: tuple[StepKind, str | None, tuple[str, ...]], **fields: object) -> Transition:
    made = [
        Step(number=number, kind=kind, routed=tuple(map(InstanceId, names)))
        if kind is StepKind.ROUTE
        else Step(number=number, kind=kind, instance=instance, nodes=tuple(map(NodeId, names)))
        for number, (kind, instance, names) in enumerate(steps)
    ]
    empty = dict.fromkeys(("kept", "started", "stopped", "pending", "dips", "unplaced"), ())
    return Transition(**{"plan": PlanId("p"), "steps": tuple(made), **empty, **fields})


def _swap() -> tuple[Transition, Fleet]:
    """``old`` on a gives way to ``new`` on b and a rented node; then a is given back."""
    rented = _node("pending/1")
    new = _instance("new", "b", "pending/1", state=InstanceState.STARTING, throughput=25.0)
    transition = _transition(
        (StepKind.PROVISION, None, ("pending/1",)),
        (StepKind.START, "new", ("b", "pending/1")),
        (StepKind.WAIT_READY, "new", ("b", "pending/1")),
        (StepKind.ROUTE, None, ("new",)),
        (StepKind.DRAIN, "old", ("a",)),
        (StepKind.STOP, "old", ("a",)),
        (StepKind.RELEASE, None, ("a",)),
        started=(new,),
        stopped=(InstanceId("old"),),
        pending=(rented,),
    )
    return transition, _fleet(["a", "b", "c"], _instance("old", "a"))


def test_each_node_is_followed_through_every_group_of_steps() -> None:
    """Columns are now, one for each group, then; each node's bars are those worked out by hand."""
    transition, fleet = _swap()
    history = build_history(transition, fleet)
    titles = [column.title for column in history.columns]
    assert titles == ["now", "provision", "start", "wait ready", "route", "drain", "stop", "release", "then"]
    rows = {row.node.id: [(bar.first, bar.last, bar.activity) for bar in row.bars] for row in history.rows}
    assert rows == {
        "a": [
            (0, 3, Activity.SERVING),
            (4, 4, Activity.READY),
            (5, 5, Activity.DRAINING),
            (6, 6, Activity.STOPPING),
            (7, 7, Activity.RELEASING),
            (8, 8, Activity.ABSENT),
        ],
        "b": [(0, 1, Activity.IDLE), (2, 3, Activity.LOADING), (4, 8, Activity.SERVING)],
        "c": [(0, 8, Activity.IDLE)],
        "pending/1": [
            (0, 0, Activity.ABSENT),
            (1, 1, Activity.PROVISIONING),
            (2, 3, Activity.LOADING),
            (4, 8, Activity.SERVING),
        ],
    }
    assert [line.values for line in history.lines] == [(10.0,) * 4 + (25.0,) * 5]


def test_steps_of_one_kind_share_a_column() -> None:
    """Two starts in a row are one column; a start after a route is another."""
    some = [_instance(name, name, state=InstanceState.STARTING) for name in "abc"]
    transition = _transition(
        (StepKind.START, "a", ("a",)),
        (StepKind.START, "b", ("b",)),
        (StepKind.ROUTE, None, ()),
        (StepKind.START, "c", ("c",)),
        started=tuple(some),
    )
    columns = build_history(transition, _fleet(["a", "b", "c"])).columns
    assert [len(column.steps) for column in columns] == [0, 2, 1, 1, 0]


def test_states_before_the_transition_are_shown_as_observed() -> None:
    """A failed, a starting and a draining instance are not shown as serving, nor counted as capacity."""
    states = {"f": InstanceState.FAILED, "s": InstanceState.STARTING, "d": InstanceState.DRAINING}
    fleet = _fleet(sorted(states), *(_instance(name, name, state=state) for name, state in states.items()))
    history = build_history(_transition((StepKind.STOP, "f", ("f",))), fleet)
    first = {row.node.id: row.bars[0].activity for row in history.rows}
    assert first == {"f": Activity.FAILED, "s": Activity.LOADING, "d": Activity.DRAINING}
    assert history.lines[0].values == (0.0, 0.0, 0.0)


def test_unreported_throughput_is_said_and_not_drawn_as_zero() -> None:
    """One instance without a throughput makes the line unknown."""
    fleet = _fleet(["a", "b"], _instance("x", "a"), _instance("y", "b", throughput=None))
    transition = _transition((StepKind.STOP, "x", ("a",)))
    assert build_history(transition, fleet).lines[0].values is None
    assert "throughput not reported" in transition_report(transition, fleet)


def test_planned_transition_ends_with_every_planned_instance_serving() -> None:
    """The replay of a transition from the planner ends with the plan's instances on their nodes, others free."""
    one = template("t", model="m", phase=Phase.DECODE, stages=(("L4x1",), ("L4x1",)), layers=(3, 5))
    fleet = _fleet([f"n{index}" for index in range(6)], _instance("leaving", "n0"))
    transition = plan_transition(plan({"t": 2}, one), fleet)
    last = {row.node.id: row.bars[-1] for row in build_history(transition, fleet).rows}
    serving = {node: bar.instance for node, bar in last.items() if bar.activity is Activity.SERVING}
    assert serving == {node: one.id for one in transition.started for node in one.nodes}
    assert {bar.activity for bar in last.values()} == {Activity.SERVING, Activity.IDLE}


def _pictures(html: str) -> list[ET.Element]:
    """The drawings of a page; raises if one is not well formed."""
    parts = html.split("<svg")[1:]
    return [ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]


def test_page_is_well_formed_and_needs_no_other_file(tmp_path: Path) -> None:
    """One HTML file: no script, no address, no file beside it; every drawing is well-formed XML."""
    write_page(tmp_path / "deep" / "t.html", transition_report(*_swap()))
    html = (tmp_path / "deep" / "t.html").read_text(encoding="utf-8")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["t.html"]
    assert "<script" not in html
    assert "http" not in html
    assert "url(#hatch)" in html
    assert len(_pictures(html)) >= 2


def test_names_are_escaped_everywhere() -> None:
    """A name that is markup is shown, never obeyed: of nodes, instances, models, agents, reasons and dips."""
    one = ServingInstance(
        id=InstanceId(EVIL),
        template=TemplateId(EVIL),
        model=ModelId(EVIL),
        phase=Phase.DECODE,
        region=REGION,
        market=Market.SPOT,
        state=InstanceState.STARTING,
        stage_nodes=((NodeId(EVIL),),),
        throughput=1.0,
    )
    node = Node(id=NodeId(EVIL), region=REGION, configuration=NodeConfigurationId(EVIL), market=Market.SPOT)
    short = Unplaced(template=TemplateId(EVIL), region=REGION, market=Market.SPOT, count=1, reason=EVIL)
    transition = _transition(
        (StepKind.START, EVIL, (EVIL,)),
        started=(one,),
        dips=(CapacityDip(what=EVIL, floor=2.0, lowest=1.0),),
        unplaced=(short,),
        plan=PlanId(EVIL),
    )
    html = transition_report(transition, Fleet(nodes=(node,), instances=()), unreachable=[EVIL])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 8
    _pictures(html)


def test_what_falls_and_what_is_missing_is_said_first() -> None:
    """A dip, an unplaced instance and a silent agent are stated in words, with their figures."""
    short = Unplaced(template=TemplateId("t"), region=REGION, market=Market.SPOT, count=2, reason="L4x1: 0 free")
    transition = _transition(
        (StepKind.STOP, "old", ("a",)),
        dips=(CapacityDip(what="m/decode", floor=12345.0, lowest=0.5),),
        unplaced=(short,),
    )
    html = transition_report(transition, _fleet(["a"], _instance("old", "a")), unreachable=["agent-7"])
    assert "Capacity of m/decode falls to 0.5, below min(old, new) = 12,345" in html
    assert "2 of t in aws/us-east-2 not placed: L4x1: 0 free" in html
    assert "No answer from agent-7" in html


def test_a_fall_is_drawn_in_the_warning_colour() -> None:
    """Capacity below the lesser of before and after is marked in exactly the columns where it is."""
    new = _instance("new", "a", state=InstanceState.STARTING)
    transition = _transition(
        (StepKind.ROUTE, None, ()),
        (StepKind.STOP, "old", ("a",)),
        (StepKind.START, "new", ("a",)),
        (StepKind.WAIT_READY, "new", ("a",)),
        (StepKind.ROUTE, None, ("new",)),
        started=(new,),
        stopped=(InstanceId("old"),),
    )
    html = transition_report(transition, _fleet(["a"], _instance("old", "a")))
    assert html.count('class="dip"') == 4


def test_nothing_to_do_is_said_without_a_picture() -> None:
    """A fleet as planned needs no step, and the page says so."""
    html = transition_report(_transition(), _fleet(["a"], _instance("x", "a")))
    assert "no step is needed" in html
    assert "<svg" not in html


def test_a_large_transition_shares_rows() -> None:
    """Beyond the limit nodes with the same history are one row that says how many; untouched ones are counted."""
    num = MAX_SINGLE_ROWS + 20
    names = [f"n{index:03}" for index in range(num)]
    leaving = [_instance(f"i{name}", name) for name in names]
    steps = [(StepKind.STOP, one.id, one.nodes) for one in leaving]
    html = transition_report(_transition(*steps), _fleet([*names, "spare"], *leaving))
    assert f"{num} nodes alike" in html
    assert "1 stay free" in html
    assert len(_pictures(html)) < 20
    small = steps[:MAX_SINGLE_ROWS]
    assert "nodes alike" not in transition_report(_transition(*small), _fleet(names, *leaving))


def test_unknown_names_are_errors() -> None:
    """A transition that belongs to another fleet is refused, not drawn wrong."""
    with pytest.raises(KeyError, match="ghost"):
        build_history(_transition((StepKind.ROUTE, None, ("ghost",))), _fleet(["a"]))


def test_bars_have_no_gaps() -> None:
    """Each row covers every column exactly once."""
    transition, fleet = _swap()
    history = build_history(transition, fleet)
    for row in history.rows:
        covered = [column for bar in row.bars for column in range(bar.first, bar.last + 1)]
        assert covered == list(range(len(history.columns)))
        assert all(isinstance(bar, Bar) for bar in row.bars)
