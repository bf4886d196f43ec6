"""Settings that are measured once on a machine, and remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.app import main
from diptych.runtime import LanguageModel, language_model, load, tuning
from diptych.runtime.settings import Settings


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diptych" / "tuning"


def speeds(monkeypatch: pytest.MonkeyPatch, prefill: Mapping[str, float]) -> None:
    """As if a prompt took so long with one session, with two, or with one that does not spin, and a step no time."""

    def measure(manifest: Any, settings: Settings, length: int, steps: int) -> tuple[float, float]:
        return prefill[settings.sessions if settings.spinning else "sleeping"], 0.0

    monkeypatch.setattr(tuning, "_measure", measure)


CHOICES: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "one": ({"one": 1.0, "two": 1.2, "sleeping": 1.1}, {"sessions": "one", "spinning": True}),
    "two, which is much faster": ({"one": 1.0, "two": 0.8, "sleeping": 1.1}, {"sessions": "two"}),
    "one, since two holds the weights twice": ({"one": 1.0, "two": 0.97, "sleeping": 1.1}, {"sessions": "one"}),
    "a busy machine": ({"one": 1.0, "two": 1.0, "sleeping": 0.5}, {"sessions": "one", "spinning": False}),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_fastest_is_chosen_and_taken(
    model: LanguageModel, cache: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    measured, expected = CHOICES[case]
    speeds(monkeypatch, measured)
    trials = tuning.tune(model.manifest.folder)
    (chosen,) = (trial for trial in trials if trial.chosen)
    tuned = load(model.manifest.folder).settings
    assert tuned == chosen.settings
    assert set(tuned.why.values()) == {"measured by diptych tune"}
    assert tuned.to_json().items() >= expected.items()


def test_the_shortest_context_is_measured_too(model: LanguageModel, cache: Path, artifact: Path) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    manifest["max_context"] = 16
    (artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert {trial.prompt_tokens for trial in tuning.tune(artifact)} == {7}


def test_what_was_measured_on_the_cpu_is_for_the_cpu(
    model: LanguageModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, {"one": 1.0, "two": 0.5, "sleeping": 1.0})
    tuning.tune(model.manifest.folder)
    assert load(model.manifest.folder).settings.sessions == "two"
    assert load(model.manifest.folder, provider="CPUExecutionProvider").settings.sessions == "two"
    opened: list[Settings] = []
    monkeypatch.setattr(language_model, "open_programs", lambda _, settings, **__: opened.append(settings))
    load(model.manifest.folder, provider="cuda")
    assert opened[0].sessions == "one"


def test_what_is_asked_for_goes_before(model: LanguageModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(monkeypatch, {"one": 1.0, "two": 0.5, "sleeping": 1.0})
    tuning.tune(model.manifest.folder)
    settings = load(model.manifest.folder, threads=1).settings
    assert settings == Settings("one", threads=1)
    assert settings.why["threads"] == "asked for"


def test_measuring_for_real(model: LanguageModel, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(model.manifest.folder)
    assert main(["tune", folder, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert len(trials) == 3  # an artifact of floats has no arithmetic to choose
    assert all(trial["prefill_s"] > 0 and trial["decode_s"] > 0 for trial in trials)
    assert sum(trial["chosen"] for trial in trials) == 1
    assert len(list(cache.iterdir())) == 1
    assert main(["tune", folder, "--forget"]) == main(["tune", folder, "--forget"]) == 0
    assert capsys.readouterr().out == "Forgotten.\nNothing was remembered.\n"
    assert load(folder).settings.why["sessions"].startswith("default")


@pytest.mark.parametrize("content", ["", "[]", '{"sessions": "three"}', '{"speed": 9}', "\0"])
def test_a_damaged_memory_counts_as_none(
    model: LanguageModel, cache: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    speeds(monkeypatch, {"one": 1.0, "two": 0.5, "sleeping": 1.0})
    tuning.tune(model.manifest.folder)
    (file,) = cache.iterdir()
    file.write_text(content, encoding="utf-8")
    assert load(model.manifest.folder).settings.sessions == "one"


def test_nowhere_to_remember(model: LanguageModel, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.parent.parent.write_text("a file where the folder should be", encoding="utf-8")
    assert main(["tune", str(model.manifest.folder)]) == 2
    assert "cache" in capsys.readouterr().err
    assert load(model.manifest.folder).settings.sessions == "one"
