"""The command line: what it prints where, its exit codes, and one line for every kind of wrong input."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import diptych
import tiny
import tiny_tokenizers
from diptych.cli import main

MODEL = tiny.llama(heads=(4, 2), head_size=16)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Things that a command may be pointed at, by the names that the tables below use."""
    root = tmp_path_factory.mktemp("cli")
    folder, gguf = tiny.write_huggingface(MODEL, root / "checkpoint"), tiny.write_gguf(MODEL, root / "model.gguf")
    unknown = shutil.copytree(folder, root / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    (root / "empty").mkdir()
    (root / "text").write_text("not a model")
    (root / "cut.gguf").write_bytes(gguf.read_bytes()[: gguf.stat().st_size // 2])
    (root / "junk.gguf").write_bytes(b"GGUF" + bytes(range(256)))
    artifact = root / "artifact"
    assert main(["export", str(folder), "-o", str(artifact), "--name", "tiny"]) == 0
    names = ("artifact", "checkpoint", "empty", "missing", "new", "text", "unknown")
    files = {"gguf": gguf, "cut": root / "cut.gguf", "junk": root / "junk.gguf"}
    return {name: root / name for name in names} | files


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line whose words ``{name}`` are places: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([word.format_map(places) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


# Command line, and words of the one line that it must cost.
WRONG_INPUT = {
    "no such file": ("export {missing} -o {new}", "missing"),
    "empty folder": ("export {empty} -o {new}", "empty"),
    "cut GGUF": ("export {cut} -o {new}", "cut.gguf"),
    "junk after the magic": ("export {junk} -o {new}", "junk.gguf"),
    "no model at all": ("export {text} -o {new}", "text"),
    "unknown architecture": ("export {unknown} -o {new}", "mamba llama gemma3_text"),
    "output exists": ("export {checkpoint} -o {artifact}", "artifact --force"),
    "output exists and is something else": ("export {checkpoint} -o {empty} --force --target no", "target"),
    "output under a file": ("export {checkpoint} -o {text}/new", "text"),
    "output where nothing can be": ("export {checkpoint} -o /proc/diptych/new", "/proc"),
    "unknown target": ("export {checkpoint} -o {new} --target tpu", "--target tpu onnx"),
    "context of nothing": ("export {checkpoint} -o {new} --max-context 0", "--max-context"),
    "context beyond the model": ("export {checkpoint} -o {new} --max-context 100000", "--max-context 256"),
    "a wrong probability": ("run {artifact} Hello --top-p=7", "--top-p"),
    "a temperature below zero": ("run {artifact} Hello --temperature -1", "--temperature"),
    "misspelt option": ("export {checkpoint} -o {new} --forse", "--forse"),
    "no output": ("export {checkpoint}", "--output"),
    "no such command": ("exprot", "exprot"),
    "verify nothing": ("verify {missing}", "missing"),
    "verify a checkpoint": ("verify {checkpoint}", "checkpoint"),
    "verify against nothing": ("verify {artifact} --source {missing}", "missing"),
    "verify no step": ("verify {artifact} --steps 0", "--steps"),
    "run nothing": ("run {missing} Hello", "missing"),
    "run a file": ("run {gguf} Hello", "model.gguf"),
    "run a checkpoint": ("run {checkpoint} Hello", "manifest.json"),
    "no prompt": ("run {artifact}", "PROMPT"),
    "cold temperature": ("run {artifact} Hello --temperature -1", "--temperature"),
    "probability beyond 1": ("run {artifact} Hello --top-p 1.5", "--top-p"),
    "template for a raw prompt": ("run {artifact} Hello --raw --system Sir", "--system --raw"),
    "three sessions": ("run {artifact} Hello --sessions three", "--sessions one two"),
    "no threads": ("run {artifact} Hello --threads 0", "--threads"),
    "chat with nothing": ("chat {missing}", "missing"),
    "inspect nothing": ("inspect {missing}", "missing"),
    "inspect an empty folder": ("inspect {empty}", "empty"),
}


@pytest.mark.parametrize(("line", "words"), WRONG_INPUT.values(), ids=WRONG_INPUT)
def test_wrong_input_costs_one_line(call: Call, places: dict[str, Path], line: str, words: str) -> None:
    code, out, err = call(*line.split())
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words.split()), err
    assert not places["new"].exists()


def test_a_failed_export_leaves_nothing_beside_its_output(call: Call, places: dict[str, Path]) -> None:
    before = set(places["new"].parent.iterdir())
    assert call("export", "{cut}", "-o", "{new}")[0] == 2
    assert set(places["new"].parent.iterdir()) == before


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"diptych {diptych.__version__}\n", "")
    code, out, _ = call()
    assert code == 0
    assert all(command in out for command in ("export", "verify", "run", "chat", "inspect"))


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from diptych.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "jax", "onnxruntime", "tokenizers"} & set(done.stderr.split())


def test_export_prints_one_json_object(call: Call, tmp_path: Path) -> None:
    code, out, err = call("export", "{gguf}", "-o", str(tmp_path / "a"), "--no-verify", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["path"] == str(tmp_path / "a")
    assert report["verification"]["status"] == "skipped"


def test_export_says_what_it_proved(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("export", "{checkpoint}", "-o", str(tmp_path / "a"))
    assert code == 0
    assert "passed" in out
    assert "diptych run" in out


def test_verify(call: Call) -> None:
    code, out, _ = call("verify", "{artifact}", "--source", "{checkpoint}", "--steps", "3", "--json")
    certificate = json.loads(out)
    assert code == 0
    assert certificate["status"] == "passed"
    assert {"files", "weights"} < {check["name"] for check in certificate["checks"]}


def test_verify_finds_a_changed_byte(call: Call, places: dict[str, Path], tmp_path: Path) -> None:
    broken = shutil.copytree(places["artifact"], tmp_path / "broken")
    weights = bytearray((broken / "weights.safetensors").read_bytes())
    weights[-1] ^= 0x40
    (broken / "weights.safetensors").write_bytes(weights)
    code, out, _ = call("verify", str(broken))
    assert code == 1
    assert "FAILED" in out


def test_run_streams_text_and_tells_the_phases_apart(call: Call) -> None:
    code, out, err = call("run", "{artifact}", "Hello", "--max-tokens", "5")
    assert code == 0
    for part in ("TTFT", "prefill", "decode", "finish: "):
        assert part in err
    as_json = json.loads(call("run", "{artifact}", "Hello", "--max-tokens", "5", "--json")[1])
    assert out == as_json["text"] + "\n"
    assert as_json["usage"]["completion_tokens"] == len(as_json["token_ids"]) <= 5


def test_run_reads_a_prompt_from_stdin(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    options = ("--raw", "--max-tokens", "4", "--json")
    piped = json.loads(call("run", "{artifact}", "-", *options)[1])
    given = json.loads(call("run", "{artifact}", "Hello", *options)[1])
    assert piped["token_ids"] == given["token_ids"]


def test_a_seed_repeats_and_stop_strings_end(call: Call) -> None:
    sampled = (
        "run",
        "{artifact}",
        "Hello",
        "--raw",
        "--max-tokens",
        "12",
        "--temperature",
        "1",
        "--seed",
        "7",
        "--json",
    )
    first, second = (json.loads(call(*sampled)[1]) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    stop = first["text"][2:4]
    stopped = json.loads(call(*sampled, "--stop", stop)[1])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == first["text"][: first["text"].index(stop)]


def test_inspect_agrees_about_artifact_and_checkpoint(call: Call) -> None:
    described = {name: json.loads(call("inspect", f"{{{name}}}", "--json")[1]) for name in ("artifact", "gguf")}
    artifact, checkpoint = described.values()
    assert (artifact["kind"], checkpoint["kind"]) == ("artifact", "checkpoint")
    for key in ("model", "parameters", "memory", "tokenizer"):
        assert artifact[key] == checkpoint[key], key
    D, F, V, N, K, H, L = 64, 128, len(tiny_tokenizers.BYTE_LEVEL), 4, 2, 16, 2
    assert artifact["parameters"] == 2 * V * D + D + L * (2 * D + D * (N + 2 * K) * H + N * H * D + 3 * D * F)
    assert artifact["memory"]["cache_bytes"] == {"256": 256 * 2 * L * K * H * 4}
    assert {"id": 2, "token": "<|im_end|>"} in artifact["tokenizer"]["eos"]
    assert artifact["tokenizer"]["chat_template"]


@pytest.mark.parametrize("source", ["artifact", "checkpoint", "gguf"])
def test_inspect_for_people(call: Call, source: str) -> None:
    code, out, err = call("inspect", f"{{{source}}}")
    assert (code, err) == (0, "")
    for part in ("llama", "2 see everything", "4 query, 2 key/value, of 16", "<|im_end|> (2)", "tokens"):
        assert part in out
    assert ("parity" in out) == (source == "artifact")


def test_inspect_says_what_an_export_would_refuse(call: Call, tmp_path: Path) -> None:
    folder = tiny.write_huggingface(MODEL, tmp_path / "model")
    tensors = MODEL.tensors()
    gone = tensors.pop("model.norm.weight")
    save_file({**tensors, "model.extra": gone.astype("float64")}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    code, out, err = call("inspect", str(folder), "--json")
    assert (code, err) == (0, "")
    tensors_problem, type_problem, tokenizer_problem = json.loads(out)["refused"]
    assert "'model.norm.weight' (for final_norm)" in tensors_problem and "'model.extra'" in tensors_problem
    assert "stored as F64" in type_problem
    assert "tokenizer" in tokenizer_problem
    assert "refused" in call("inspect", str(folder))[1]
    assert json.loads(call("inspect", "{checkpoint}", "--json")[1])["refused"] == []


class Keyboard:
    """What a person types: lines, and exceptions for the keys that are none."""

    def __init__(self, *events: str | type[BaseException]) -> None:
        self.events: Iterator[str | type[BaseException]] = iter(events)

    def __call__(self, prompt: str) -> str:
        event = next(self.events, EOFError)
        if isinstance(event, str):
            return event
        raise event


def test_a_conversation_needs_a_template(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.runtime.Text.has_chat_template", False)
    code, out, err = call("chat", "{artifact}")
    assert (code, out) == (2, "")
    assert "chat template" in err and "--raw" in err


def test_chat_keeps_the_conversation(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, str]]] = []
    stream = diptych.runtime.LanguageModel.stream

    def spy(self: Any, messages: Any, **options: Any) -> Any:
        seen.append([dict(message) for message in messages])
        return stream(self, messages, **options)

    monkeypatch.setattr("diptych.runtime.LanguageModel.stream", spy)
    monkeypatch.setattr("builtins.input", Keyboard("one", KeyboardInterrupt, "two", "/reset", "/what", " ", "three"))
    code, _, err = call("chat", "{artifact}", "--system", "Be brief.", "--max-tokens", "3")
    assert code == 0
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert [messages[-1]["content"] for messages in seen] == ["one", "two", "three"]
    assert "/what" in err
    assert "reused" in err.splitlines()[2], "the second turn computes only what is new"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = diptych.runtime.Session.decode
    steps: list[int] = []

    def interrupted_once(self: Any, *arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return decode(self, *arguments)

    monkeypatch.setattr("diptych.runtime.Session.decode", interrupted_once)
    monkeypatch.setattr("builtins.input", Keyboard("one", "two"))
    code, _, err = call("chat", "{artifact}", "--max-tokens", "6")
    assert code == 0
    assert [line.rpartition(" ")[2] for line in err.splitlines()[1:]] == ["cancelled", "length"]


def test_ctrl_c_ends_a_run_with_what_is_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("diptych.runtime.Session.decode", interrupted)
    code, out, err = call("run", "{artifact}", "Hello")
    assert (code, out[-1], err.count("\n")) == (130, "\n", 1)
    assert "finish: cancelled" in err


def test_a_question_that_does_not_fit_ends_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", Keyboard("word " * 300, "two"))
    code, _, err = call("chat", "{artifact}", "--max-tokens", "3")
    assert code == 0
    first, second = err.splitlines()[1:]
    assert "256" in first
    assert first.startswith("Error: ")
    assert "finish: length" in second


def test_piped_answers_come_without_prompts(places: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "diptych", "chat", str(places["artifact"]), "--max-tokens", "3"]
    done = subprocess.run(command, input="one\ntwo\n", capture_output=True, text=True, check=True)
    answers = "".join(done.stdout.splitlines())
    assert answers and not done.stdout.startswith("> ") and "\n> " not in done.stdout


def test_a_verification_that_failed_says_in_what(call: Call, places: dict[str, Path], tmp_path: Path) -> None:
    """A tab for a space in a file that no program computes with: only its hash differs."""
    damaged = shutil.copytree(places["artifact"], tmp_path / "damaged")
    file = damaged / "tokenizer_config.json"
    file.write_bytes(file.read_bytes().replace(b" ", b"\t", 1))
    code, out, _ = call("verify", str(damaged), "--source", "{checkpoint}", "--steps", "3")
    assert (code, out.partition("\n")[0].strip()) == (1, "verification failed: files")


def test_a_missing_extra_is_named(places: dict[str, Path]) -> None:
    code = "import sys; sys.modules['jax'] = None; from diptych.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["export", str(places["checkpoint"]), "-o", str(places["new"])]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'diptych[export]'" in done.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("a fault of ours"), ModuleNotFoundError("no nonsense", name="nonsense")]
)
def test_what_nobody_expected_keeps_its_traceback(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("diptych.runtime.load", fail)
    with pytest.raises(type(error)):
        call("run", "{artifact}", "Hello")
