"""One profiling job through its agent: started once, fetched by whoever asks again, every end with its type.

The agent is the real state machine with a journal in memory; only sockets and processes are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coral_tasks.dispatch import profiling_jobs
from coral_tasks.dispatch.epochs import EpochStore
from coral_tasks.dispatch.profiling_jobs import JobPolicy, ProfilingJob, run_profiling_job
from coral_tasks.domain.errors import EngineFault, Unavailable, UnknownName, ValidationFailed
from coral_tasks.domain.names import NodeId
from coral_tasks.protocol.agent_machine import (
    AgentMachine,
    CommandReceived,
    EngineExited,
    FenceReceived,
    FenceState,
    SendOutcome,
    SendReport,
    Slot,
    SpawnEngine,
)
from coral_tasks.protocol.messages import (
    Command,
    Fence,
    FetchJob,
    JobResult,
    NodeReport,
    Observe,
    Report,
    SlotState,
    ToAgent,
    ToController,
)

FAST = JobPolicy(observe_s=0.2, answer_s=0.3, resend_s=0.05, poll_s=0.001, silent_s=0.5, grace_s=0.1)
JOB = ProfilingJob(id="night 1", node=NodeId("n1"), request='{"model": "tiny"}', timeout_s=5.0)


@dataclass
class Agent:
    """Agent ``a`` with nodes n1 and n2. ``ends``: result of a job's process, None as long as it runs.

    ``tamper``: called with each message before the agent sees it; False drops it.
    """

    machine: AgentMachine = field(
        default_factory=lambda: AgentMachine(incarnation="run 1", slots={"n1": Slot(node="n1"), "n2": Slot(node="n2")})
    )
    ends: JobResult | None = None
    results: dict[str, JobResult] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    tamper: Callable[[ToAgent], bool] = lambda _: True
    silent: bool = False
    inbox: list[tuple[str, ToController]] = field(default_factory=list)
    agents: tuple[str, ...] = ("a",)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, agent: str, message: ToAgent) -> bool:
        if self.silent or agent != "a" or not self.tamper(message):
            return False
        match message:
            case Observe():
                self.answer(self.report(message.request, accepted=True))
            case FetchJob():
                self.step()
                self.answer(self.result(message))
            case Fence():
                self.feed(FenceReceived(peer=b"", fence=message))
            case Command():
                self.feed(CommandReceived(peer=b"", command=message, now_s=0.0))
        return True

    def receive(self, _: float) -> list[tuple[str, ToController]]:
        found, self.inbox = self.inbox, []
        return found

    def answer(self, message: ToController) -> None:
        self.inbox.append(("a", message))

    def feed(self, event) -> None:
        reaction = self.machine.handle(event)
        self.machine.commit(reaction.changes)
        for instruction in reaction.instructions:
            match instruction:
                case SpawnEngine(slot=slot):
                    self.started.append(slot.job)
                case SendOutcome(outcome=outcome):
                    self.answer(outcome)
                case SendReport(request=request, accepted=accepted):
                    self.answer(self.report(request, accepted=accepted))

    def step(self) -> None:
        """End the job's process if it is to end."""
        for slot in self.machine.slots.values():
            if slot.job and self.ends is not None:
                self.results[slot.job] = self.ends
                self.feed(EngineExited(node=slot.node, launch=slot.launch, detail="ended", now_s=1.0))

    def result(self, message: FetchJob) -> JobResult:
        if any(slot.job == message.job for slot in self.machine.slots.values()):
            return JobResult(request=message.request, job=message.job, status="running")
        kept = self.results.get(message.job, JobResult(request="-", job=message.job, status="unknown"))
        return JobResult(
            request=message.request, job=message.job, status=kept.status, rows=kept.rows, detail=kept.detail
        )

    def report(self, request: str, *, accepted: bool) -> Report:
        nodes = tuple(
            NodeReport(
                node=name,
                region="r",
                configuration="L4x1",
                market="on_demand",
                engine="vllm",
                address="127.0.0.1",
                master_port=1,
                state=slot.state,
                excluded=slot.excluded,
                detail=slot.detail,
            )
            for name, slot in self.machine.slots.items()
        )
        fence = self.machine.fence
        return Report(
            request=request,
            agent="a",
            incarnation=self.machine.incarnation,
            epoch=fence.epoch,
            round=fence.round,
            accepted=accepted,
            nodes=nodes,
        )


GOOD = JobResult(request="-", job="night 1", status="succeeded", rows="[]")


@pytest.fixture
def agent(monkeypatch) -> Agent:
    """An agent that every job reaches."""
    made = Agent()
    monkeypatch.setattr(profiling_jobs, "AgentLinks", lambda *_, **__: made)
    return made


@pytest.fixture
def ask(tmp_path: Path, agent: Agent) -> Callable[[], str]:
    """Ask for JOB as a task would."""
    epochs = EpochStore(path=tmp_path / "epochs.sqlite")
    return lambda **changes: run_profiling_job(replace(JOB, **changes), {}, tmp_path, epochs=epochs, policy=FAST)


def test_rows_come_back_and_a_second_asking_starts_nothing(agent: Agent, ask) -> None:
    """The same id gives the same rows from the one job that ran."""
    agent.ends = replace_result(rows='[{"a": 1}]')
    assert ask() == '[{"a": 1}]'
    assert ask() == '[{"a": 1}]'
    assert agent.started == ["night 1"]
    assert agent.machine.slots["n1"].state is SlotState.EMPTY


def replace_result(**changes: str) -> JobResult:
    """GOOD with other fields."""
    fields = {"status": GOOD.status, "rows": GOOD.rows, "detail": GOOD.detail} | changes
    return JobResult(request="-", job=GOOD.job, **fields)


def test_a_job_that_runs_is_waited_for_not_started_again(agent: Agent, ask) -> None:
    """A task that died and comes back while the job runs waits for that job."""
    with pytest.raises(EngineFault, match=r"job night 1 on n1 still runs after 0.01 s"):
        ask(timeout_s=0.01)
    assert agent.machine.slots["n1"].state is SlotState.PROFILING
    agent.ends = GOOD
    assert ask() == "[]"
    assert agent.started == ["night 1"]


def test_a_failed_job_says_why_and_stays_failed(agent: Agent, ask) -> None:
    """The agent's words reach the caller, at the second asking too."""
    agent.ends = replace_result(status="failed", rows="", detail="ended with code 3")
    for _ in range(2):
        with pytest.raises(EngineFault, match=r"job night 1 on n1 failed: ended with code 3"):
            ask()
    assert agent.started == ["night 1"]


def test_a_job_that_got_lost_is_a_fault_and_is_not_started_again(agent: Agent, ask) -> None:
    """A machine that lost power has no result; the replayed command still starts nothing."""
    agent.ends = GOOD
    ask()
    agent.results.clear()
    with pytest.raises(EngineFault, match="its agent has no result of it: ended"):
        ask()
    assert agent.started == ["night 1"]


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (Slot(node="n1", state=SlotState.PROFILING, job="other", launch="x"), "it is profiling"),
        (Slot(node="n1", state=SlotState.FAILED), "it is failed"),
        (Slot(node="n1", excluded="engine ended 6 times"), "excluded: engine ended 6 times"),
    ],
)
def test_a_node_that_is_not_idle_is_left_alone(agent: Agent, ask, slot: Slot, reason: str) -> None:
    """Busy is an expected answer with its reason, and asking again once the node is idle works."""
    agent.machine.slots["n1"] = slot
    with pytest.raises(Unavailable, match=f"node n1 cannot be measured: {reason}"):
        ask()
    assert agent.started == []
    agent.machine.slots["n1"] = Slot(node="n1")
    agent.ends = GOOD
    assert ask() == "[]"


def test_an_unknown_node_lists_the_known_ones(agent: Agent, ask) -> None:
    """All agents answered and none has it: the name is wrong."""
    with pytest.raises(UnknownName, match="unknown node; known: n1, n2"):
        ask(node=NodeId("n9"))


def test_silent_agents_are_named(agent: Agent, ask) -> None:
    """While an agent does not answer, a missing node may be its: unavailable, not unknown."""
    agent.agents = ("a", "b")
    with pytest.raises(Unavailable, match="node n9 is not found: no answer from b"):
        ask(node=NodeId("n9"))
    agent.silent = True
    with pytest.raises(Unavailable, match="no answer from a, b"):
        ask()


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        (Command, 1, "no answer from agent a of node n1"),
        (FetchJob, 2, r"agent a is silent for 0\.5 s while job night 1 runs; ask for the same job again"),
    ],
)
def test_an_agent_that_falls_silent_after_the_start(agent: Agent, ask, kind: type, count: int, message: str) -> None:
    """After a bounded silence the caller is told to ask again, and asking again brings the rows of the one job."""
    heard: list[ToAgent] = []

    def mute(one: ToAgent) -> bool:
        heard.extend([one] * isinstance(one, kind))
        agent.silent = len(heard) == count  # it still hears this one and is gone afterwards
        return True

    agent.tamper = mute
    with pytest.raises(Unavailable, match=message):
        ask()
    agent.tamper, agent.silent, agent.ends = lambda _: True, False, GOOD
    assert ask() == "[]"
    assert agent.started == ["night 1"]


def test_another_controller_in_between_is_met_with_a_newer_epoch(agent: Agent, ask) -> None:
    """A dispatch that takes the agent over between fence and command costs one more look, not the job."""
    agent.ends = GOOD
    raised: list[int] = []

    def overtake(message: ToAgent) -> bool:
        if isinstance(message, Command) and not raised:
            raised.append(message.epoch + 1)
            agent.machine.fence = FenceState(epoch=message.epoch + 1, round=1, owner="dispatch")
        return True

    agent.tamper = overtake
    assert ask() == "[]"
    assert agent.machine.fence.epoch > raised[0]
    assert agent.started == ["night 1"]


def test_controllers_that_never_let_go_win(agent: Agent, ask) -> None:
    """If every try is overtaken, the node is left to them and nothing is started."""

    def overtake(message: ToAgent) -> bool:
        if isinstance(message, Command):
            agent.machine.fence = FenceState(epoch=message.epoch + 1, round=1, owner="dispatch")
        return True

    agent.tamper = overtake
    with pytest.raises(Unavailable, match="other controllers keep taking agent a over; node n1 is left to them"):
        ask()
    assert agent.started == []


def test_a_restarted_agent_is_asked_again_under_its_new_run(agent: Agent, ask) -> None:
    """An agent that restarts between report and command refuses; the next look has its new run."""
    agent.ends = GOOD

    def restart(message: ToAgent) -> bool:
        if isinstance(message, Command) and agent.machine.incarnation == "run 1":
            agent.machine.incarnation = "run 2"
        return True

    agent.tamper = restart
    assert ask() == "[]"
    assert agent.started == ["night 1"]


def test_an_epoch_store_that_was_lost_does_not_lock_the_job_out(agent: Agent, ask) -> None:
    """The new epoch lies above whatever the agents have seen."""
    agent.machine.fence = FenceState(epoch=77, round=3, owner="dispatch")
    agent.ends = GOOD
    assert ask() == "[]"
    assert agent.machine.fence.epoch == 78


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"id": ""}, "id must be a non-empty text"),
        ({"id": "x" * 201}, "id must not exceed 200 characters"),
        ({"request": "x" * 200_001}, "request must not exceed 200000 characters"),
        ({"timeout_s": float("nan")}, "timeout_s must be finite and above zero"),
    ],
)
def test_a_job_that_no_agent_could_take_is_refused(change: dict[str, object], rule: str) -> None:
    """What the wire format would not carry is refused before anything is sent."""
    with pytest.raises(ValidationFailed, match=rule):
        replace(JOB, **change)
