"""The benchmark: its arithmetic, its protocol and its tables. Nothing is timed here; engines and clocks are doubles."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import peers, plots
from diptych.bench import figures, report, rounds, run, worker
from diptych.bench.ceilings import Engine as CeilingsEngine
from diptych.bench.engines import HERE, Engine, EngineError, Spec
from diptych.bench.plan import Case, Plan
from diptych.bench.worker import Worker
from diptych.cli import main

TINY = Path(__file__).parents[1] / "artifacts" / "tiny"
PLAN = Plan((4, 8), (4,), (1, 2), steps=3, loads=1, threads=1)

# ------------------------------------------------------------------------------------------------------------- doubles


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """A double: takes 1 s to open, 1 s a token of a prompt, 0.25 s a step, and notes what it was told."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.told = clock, list[Any]()
        clock.now += 1

    def prefill(self, tokens: list[int], rows: int) -> None:
        self.told.append(("prefill", tuple(tokens), rows))
        self.clock.now += len(tokens)

    def decode(self, token: int, rows: int) -> None:
        self.told.append(("decode", token, rows))
        self.clock.now += 0.25

    def rewind(self, length: int, rows: int) -> None:
        self.told.append(("rewind", length, rows))


class FakeGenerator:
    """A double of an engine that only generates: tells 2 s and 0.5 s a step."""

    def generate(self, tokens: list[int], steps: int) -> tuple[float, float]:
        return 2.0, 0.5 * steps


FAKE_ADAPTER = """
class Engine:  # a double: works in no time, and says so where somebody might read answers
    def __init__(self, model, fails=""):
        print("opening", model)
        self.fails = fails
    def prefill(self, tokens, rows):
        if self.fails == "prefill" and len(tokens) == 8: raise RuntimeError("no room for\\n8 tokens")
    def decode(self, token, rows): pass
    def rewind(self, length, rows): pass
    def what(self): return self.fails
    def leave(self): import sys; sys.exit("gone away")
"""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter.py"
    path.write_text(FAKE_ADAPTER, encoding="utf-8")
    return path


@pytest.fixture
def fake() -> tuple[Worker, list[Any]]:
    """A worker of a loaded fake engine, and what that is told from now on."""
    clock = Clock()
    engine = FakeEngine(clock)
    one = Worker(lambda: engine, clock)
    one.load([1])
    engine.told.clear()
    return one, engine.told


# -------------------------------------------------------------------------------------------------------------- worker


def test_loading_is_timed_apart_from_the_first_token() -> None:
    clock = Clock()
    assert Worker(lambda: FakeEngine(clock), clock).load([5, 6]) == {"load": 1.0, "first_token": 3.0}


def test_a_prompt_is_timed_as_often_as_asked(fake: tuple[Worker, list[Any]]) -> None:
    one, told = fake
    assert one.prefill([1, 2, 3], repeats=3) == 3.0
    assert told == [("prefill", (1, 2, 3), 1)] * 3


def test_only_steps_are_timed_in_a_decode(fake: tuple[Worker, list[Any]]) -> None:
    one, told = fake
    assert one.decode([7, 8], [1, 2, 3], rows=2) == 0.25
    assert told[0] == ("prefill", (7, 8), 2)
    assert told[1:] == [("decode", token, 2) for token in (1, 2, 1, 2, 3)]  # two to warm up


def test_a_context_that_is_there_is_not_computed_again(fake: tuple[Worker, list[Any]]) -> None:
    one, told = fake
    one.prefill([1, 2, 3, 4])
    one.decode([1, 2, 3], [9])
    one.decode([1, 2], [9])
    one.decode([1, 2, 3], [9])  # its third token has been overwritten
    assert [what for what in told if what[0] != "decode"] == [
        ("prefill", (1, 2, 3, 4), 1),
        ("rewind", 3, 1),
        ("rewind", 2, 1),
        ("prefill", (1, 2, 3), 1),
    ]


def test_an_engine_that_only_generates_times_itself() -> None:
    one = Worker(FakeGenerator)
    assert one.load([1])["first_token"] >= 0
    assert (one.prefill([1, 2]), one.decode([1, 2], [3, 4])) == (2.0, 0.5)


def test_errors_are_answers() -> None:
    answers = io.StringIO()

    def refuse() -> None:
        raise ValueError("no\nmodel")

    requests = io.StringIO('{"do": "load", "tokens": [1]}\n{"do": "memory"}\n')
    worker.serve(Worker(refuse), requests, answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first == {"error": "ValueError: no model"}
    assert second["value"].keys() <= {"memory", "private"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells private memory")
def test_private_memory_is_what_came_behind_the_imports() -> None:
    one = Worker(lambda: bytearray(b"x") * (64 << 20))
    before = one.memory()["private"]
    one.call("isascii")
    assert 60 << 20 < one.memory()["private"] - before < 80 << 20


def test_what_the_system_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "status", lambda field: None)
    monkeypatch.setattr(worker, "peak_memory", lambda: None)
    assert Worker(FakeGenerator).memory() == {}


def test_a_worker_needs_nothing_but_python() -> None:
    source = (HERE / "worker.py").read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= set(sys.stdlib_module_names)


# ---------------------------------------------------------------------------------------------------- processes, rounds


def test_an_engines_process_answers_and_ends(adapter: Path) -> None:
    with Engine(Spec("fake", adapter, {"model": "m", "fails": "x"})) as engine:
        assert engine.ask("load", tokens=[1]).keys() == {"load", "first_token"}
        assert engine.ask("call", name="what") == "x"
        with pytest.raises(EngineError, match=r"^fake: AttributeError: "):
            engine.ask("call", name="nothing")
        with pytest.raises(EngineError, match=r"^fake: its process ended: gone away$"):
            engine.ask("call", name="leave")


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import there_is_no_such_module", encoding="utf-8")
    with (
        Engine(Spec("broken", tmp_path / "broken.py", {})) as engine,
        pytest.raises(EngineError, match="No module named 'there_is_no_such_module'"),
    ):
        engine.ask("load", tokens=[1])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A double of the machine: its ceilings are stated, not measured."""
    path = tmp_path / "ceilings.py"
    path.write_text("class Engine:\n  def bandwidth(self): return 1e9\n  def arithmetic(self): return 1e12\n")
    monkeypatch.setattr(rounds, "ceilings", lambda threads: Spec("ceilings", path, {}))


@pytest.mark.usefixtures("machine")
def test_a_round_has_every_case_of_every_engine_and_goes_on_without_what_fails(adapter: Path) -> None:
    specs = [
        Spec("good", adapter, {"model": "m"}, batches=True),
        Spec("bad", adapter, {"model": "m", "fails": "prefill"}),
        Spec("absent", adapter, {"modell": "m"}),
    ]
    said: list[str] = []
    measured = list(rounds.measure(specs, PLAN, 97, 2, said.append))
    assert len(measured) == 2
    for one in measured:
        cases = {"prefill 4", "prefill 8", "decode 4", "decode 4 × 2"}
        assert cases | {f"{case}, ceiling" for case in cases} <= one["good"].keys()
        assert one["good"]["prefill 4, ceiling"] == 1e12
        assert one["good"]["decode 4 × 2, ceiling"] == 1e9
        cases = {"prefill 4", "decode 4"}
        found = {name for name in one["bad"] if name.startswith(("prefill", "decode"))}
        assert found == cases | {f"{case}, ceiling" for case in cases}
        assert "absent" not in one
    assert [{"load", "first_token"} <= one["good"].keys() for one in measured] == [True, False]
    complaints = [remark for remark in said if "Error" in remark]
    assert [complaint.partition(":")[0] for complaint in complaints] == ["load", "prefill 8", "fresh"]
    assert complaints[1] == "prefill 8: bad: RuntimeError: no room for 8 tokens"


def test_an_interrupted_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def measure(specs: Any, plan: Any, vocabulary: int, count: int, report: Any) -> Iterator[rounds.Round]:
        asked.append(count)
        for number in range(count):
            if number == 2:
                raise KeyboardInterrupt
            yield {"a": {"prefill 4": 1.0}}

    monkeypatch.setattr(run, "measure", measure)
    kept, specs = tmp_path / "deep" / "rounds.json", [Spec("a", TINY, {})]

    def go(plan: Plan) -> list[rounds.Round]:
        return run.go(specs, plan, 97, 3, lambda remark: None, kept)

    with pytest.raises(KeyboardInterrupt):
        go(PLAN)
    assert len(go(PLAN)) == 3
    assert len(go(PLAN)) == 3
    assert asked == [3, 1]
    with pytest.raises(KeyboardInterrupt):
        go(Plan(steps=5))  # rounds of another plan are no rounds of this one


# ---------------------------------------------------------------------------------------------------------------- plan


@given(st.builds(Case, st.sampled_from(["prefill", "decode"]), st.integers(1, 9999), st.integers(1, 64)))
def test_cases_have_names(case: Case) -> None:
    assert Case.parse(str(case)) == case


def test_the_plan_is_what_we_report() -> None:
    cases = {str(case) for case in Plan().cases(batches=True)}
    assert {f"prefill {n}" for n in (32, 128, 512, 2048)} <= cases
    assert {f"decode {n}{rows}" for n in (16, 512, 2000) for rows in ("", " × 4", " × 8")} <= cases
    assert len(cases) == 13
    assert all(case.rows == 1 for case in Plan().cases(batches=False))


@given(st.integers(1, 3000))
def test_a_plan_stays_within_the_context(longest: int) -> None:
    plan = Plan().within(longest)
    assert plan.capacity <= longest
    assert bool(plan.prompts) == (longest >= 32)
    assert len(plan.tokens(97)) > plan.capacity


def test_prompts_are_the_same_for_everyone() -> None:
    assert Plan().tokens(97) == Plan().tokens(97)
    assert set(Plan().tokens(97)) == set(range(97))


# ------------------------------------------------------------------------------------------------------------- figures

MEASURED: list[rounds.Round] = [
    {
        "a": {"prefill 8": 2, "prefill 8, ceiling": 8, "decode 4 × 2": 0.5, "decode 4 × 2, ceiling": 10},
        "b": {"prefill 8": 4, "prefill 8, ceiling": 1},
    },
    {"a": {"prefill 8": 9, "prefill 8, ceiling": 8}, "b": {"prefill 8": 9}},
    {"a": {"prefill 8": 4, "prefill 8, ceiling": 4}, "b": {"prefill 8": 12}},
    {"a": {"prefill 8": 1, "prefill 8, ceiling": 16}},
]
SPECS = [Spec("a", TINY, {}, batches=True, weights=7, read=2, operations=1), Spec("b", TINY, {})]


def test_medians_are_over_the_rounds_that_have_the_figure() -> None:
    assert figures.median(MEASURED, "a", "prefill 8") == 3.0
    assert figures.median(MEASURED, "b", "prefill 8") == 9.0
    assert figures.median(MEASURED, "a", "decode 4 × 2") == 0.5
    assert figures.median(MEASURED, "b", "decode 4") is None


def test_ratios_are_taken_within_rounds() -> None:
    assert figures.ratio(MEASURED, "a", "b", "prefill 8") == 2.0  # of 2, 1, 3; the medians' ratio would be 3
    assert figures.ratio(MEASURED, "b", "a", "prefill 8") == 0.5
    assert figures.ratio(MEASURED, "a", "a", "prefill 8") == 1.0
    assert figures.ratio(MEASURED, "a", "b", "decode 4 × 2") is None


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=9), st.floats(0.5, 3))
def test_a_busy_round_moves_no_ratio(times: list[tuple[float, float]], busy: float) -> None:
    calm = [{"a": {"x": a}, "b": {"x": b}} for a, b in times]
    slow = [{engine: {"x": seconds["x"] * busy} for engine, seconds in one.items()} for one in calm]
    assert figures.ratio(slow, "a", "b", "x") == pytest.approx(figures.ratio(calm, "a", "b", "x"))


def test_speeds_count_all_tokens() -> None:
    assert figures.speed(Case("prefill", 512), 2.0) == 256
    assert figures.speed(Case("decode", 512, 4), 0.5) == 8


def test_rooflines() -> None:
    # a prompt of 8 tokens with 1 operation each: 8 / (8, 8, 4, 16) s are possible; 2, 9, 4, 1 s were measured
    assert figures.roofline(MEASURED, SPECS[0], Case("prefill", 8)) == pytest.approx(0.5)
    # 2 bytes at 10 bytes/s are 0.2 s, of 0.5 s measured, for any number of rows
    assert figures.roofline(MEASURED, SPECS[0], Case("decode", 4, 2)) == pytest.approx(0.4)
    assert figures.roofline(MEASURED, SPECS[1], Case("prefill", 8)) is None


def test_ceilings_are_the_largest_of_a_round() -> None:
    assert figures.ceiling(MEASURED, [Case("prefill", 8)]) == 8  # of 8, 8, 4, 16
    assert figures.ceiling(MEASURED, [Case("prefill", 8), Case("decode", 4, 2)]) == 9  # of 10, 8, 4, 16
    assert figures.ceiling(MEASURED, [Case("decode", 9)]) is None


def test_work_of_an_artifact() -> None:
    manifest: dict[str, Any] = {
        "config": {"tied": False, "D": 4, "F": 6, "N": 2, "K": 1, "H": 2, "gated": True, "layers": [{"experts": None}]},
        "tensors": {
            "embed": {"dtype": "float32", "shape": [10, 4], "sources": ["e"]},
            "layers.0.mlp.up.packed": {"dtype": "uint8", "shape": [6, 1, 2], "sources": ["g"]},
            "layers.0.mlp.up.scale": {"dtype": "float32", "shape": [6, 1], "sources": ["g"]},
            "constants.rope": {"dtype": "float32", "shape": [100, 2], "sources": []},
        },
    }
    assert run.bytes_read(manifest) == 12 + 24
    manifest["config"]["tied"] = True  # then every row of it is read by the head
    assert run.bytes_read(manifest) == 12 + 24 + 160
    # q 4×4, k and v 4×2, out 4×4; gate, up and down 4×6
    assert run.operations(manifest["config"]) == 2 * (16 + 8 + 8 + 16 + 3 * 24)
    experts = {**manifest["config"], "layers": [{"experts": {"top_k": 2, "F": 3, "shared_F": 1}}]}
    assert run.operations(experts) == 2 * (48 + 3 * 4 * 7)


# ----------------------------------------------------------------------------------------------------- tables and plots


def shown(found: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(*report.tables(found), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_both_phases_have_their_own_table() -> None:
    found = report.summary(SPECS, PLAN, MEASURED)
    assert json.loads(json.dumps(found))["engines"]["b"]["cases"]["prefill 8"]["times_first"] == 0.5
    text = shown(found)
    prefill, decode = text.index("Prefill, tokens/s"), text.index("Decode, tokens/s")
    assert prefill < text.index("1 (0.50×)") < decode < text.index("4 40%")


def test_memory_and_export_have_tables() -> None:
    measured: list[rounds.Round] = [{"a": {"load": 1.5, "memory": 9e9, "private": 14}, "b": {"load": 2}}]
    export = {"options": {"quantize": "int4"}, "seconds": {"trace": 1.5, "weights": 2}, "memory": None}
    found = report.summary(SPECS, PLAN, measured, export)
    assert found["engines"]["a"]["private_times_weights"] == 2.0
    lines = [line.split() for line in shown(found).splitlines()]
    assert ["a", "1.50", "s", "–", "9.00", "GB", "14", "B", "2.00", "7", "B"] in lines
    assert ["b", "2.00", "s", "–", "–", "–", "–", "–"] in lines
    assert ["all", "3.5"] in lines
    assert "quantize int4" in shown(found)


def test_plots_draw_one_row_by_length() -> None:
    cases: dict[str, dict[str, Any]] = {
        "decode 512": {"tokens_per_s": 2.0, "share_of_roofline": None},
        "decode 16": {"tokens_per_s": 3.0, "share_of_roofline": 0.5},
        "decode 16 × 4": {"tokens_per_s": 9.0, "share_of_roofline": 0.1},
        "prefill 32": {"seconds": 1.0, "share_of_roofline": 0.7},
    }
    lines = {plot.file: plots.points(plot, cases) for plot in plots.PLOTS}
    assert lines == {
        "ttft": [(32, 1.0)],
        "decode": [(16, 3.0), (512, 2.0)],
        "prefill-roofline": [(32, 0.7)],
        "decode-roofline": [(16, 0.5)],
    }


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    files = plots.draw({"model": "tiny", **report.summary(SPECS, PLAN, MEASURED)}, tmp_path)
    assert [file.name for file in files] == ["ttft.png", "prefill-roofline.png"]  # no decode of one row was measured
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


# ----------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("path", sorted(peers.ENGINES.glob("*.py")), ids=lambda path: path.stem)
def test_adapters_have_the_shape_of_an_engine(path: Path) -> None:
    """Read, not imported: what they import is seldom installed."""
    [engine] = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    methods = {
        node.name: [argument.arg for argument in node.args.args]
        for node in engine.body
        if isinstance(node, ast.FunctionDef)
    }
    assert engine.name == "Engine"
    assert methods.pop("__init__")[:2] == ["self", "model"]
    stepping = {
        "prefill": ["self", "tokens", "rows"],
        "decode": ["self", "token", "rows"],
        "rewind": ["self", "length", "rows"],
    }
    assert methods in (stepping, {"generate": ["self", "tokens", "steps"]})


def test_every_peer_has_its_adapter() -> None:
    assert {path.stem for path in peers.ENGINES.glob("*.py")} == {"jax_model", *(peer.name for peer in peers.PEERS)}


def test_a_peers_engine_runs_in_its_environment(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(bytes(12))
    for peer in peers.PEERS[1:]:
        spec = peers.spec(peer, gguf, PLAN)
        assert Path(spec.python) == peer.python
        assert (spec.options["model"], spec.options["threads"], spec.weights) == (str(gguf), 1, 12)


def test_our_engine_takes_rows_steps_and_prompts() -> None:
    """Through a worker, as it is started; no figure is looked at."""
    [spec], plan, vocabulary = run.artifacts([TINY], PLAN)
    tokens = plan.tokens(vocabulary)
    with Engine(spec) as engine:
        engine.ask("load", tokens=tokens[:2])
        for rows in plan.rows:
            assert engine.ask("decode", context=tokens[:4], tokens=tokens[4:6], rows=rows) > 0
        assert engine.ask("prefill", tokens=tokens[:8], repeats=2) > 0
    assert spec.read and spec.weights and spec.read < spec.weights


def test_ceilings_are_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEBIBYTES", "SIDE", "TOKENS", "REPEATS"):
        monkeypatch.setattr(f"diptych.bench.ceilings.{name}", 1)
    engine = CeilingsEngine(threads=2)
    assert engine.bandwidth() > 0
    assert engine.arithmetic() > 0


def test_artifacts_are_compared_on_the_same_tokens(tmp_path: Path) -> None:
    for size in (97, 98):
        folder = tmp_path / str(size)
        folder.mkdir()
        for file in TINY.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["vocabulary"]["size"] = size
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocabularies of \[97, 98\]"):
        run.artifacts([tmp_path / "97", tmp_path / "98"], PLAN)


def test_variants_are_engines_of_their_own(tmp_path: Path) -> None:
    def names(folders: list[Path], **variants: list[Any]) -> list[str]:
        return [spec.name for spec in run.artifacts(folders, PLAN, variants)[0]]

    other = tmp_path / "tiny"
    shutil.copytree(TINY, other)
    assert names([TINY]) == names([TINY], threads=[3]) == ["tiny"]
    assert names([TINY], threads=[1, 2]) == ["tiny, threads 1", "tiny, threads 2"]
    both = names([TINY], threads=[1, 2], sessions=["one", "two"])
    assert both == [f"tiny, threads {n}, sessions {s}" for n in (1, 2) for s in ("one", "two")]
    assert names([TINY, other]) == [str(TINY), str(other)]  # one name for two is none


def test_variants_run() -> None:
    [one, two], plan, vocabulary = run.artifacts([TINY], PLAN, {"sessions": ["one", "two"]})
    for spec in (one, two):
        with Engine(spec) as engine:
            assert engine.ask("load", tokens=plan.tokens(vocabulary)[:2])["load"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--threads", "1,x"], "'x' is none"), (["--threads", "0"], "'0' is none"), (["--sessions", "three"], "one, two")],
)
def test_wrong_variants(capsys: pytest.CaptureFixture[str], options: list[str], reason: str) -> None:
    assert main(["bench", str(TINY), *options]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_says_what_is_no_artifact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_the_command_prints_both_phases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"tiny": {"prefill 32": 1.0, "decode 16": 1.0, "decode 16, ceiling": 1e9}}
    monkeypatch.setattr(run, "measure", lambda *_: iter([measured]))
    assert main(["bench", str(TINY), "--rounds", "1", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engines"]["tiny"]["cases"]["prefill 32"]["tokens_per_s"] == 32
    assert found["plan"]["prompts"] == [32]
    assert found["ceilings"] == {"arithmetic": None, "bandwidth": 1e9}
