"""Opening graphs: what was asked for is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from diptych.runtime import LanguageModel, load, machine
from diptych.runtime.settings import Settings

AVAILABLE = ort.get_available_providers()


@pytest.mark.skipif("CUDAExecutionProvider" in AVAILABLE, reason="there is a CUDA provider here")
@pytest.mark.parametrize("name", ["cuda", "CUDA", "CUDAExecutionProvider"])
def test_a_provider_that_is_not_here(model: LanguageModel, name: str) -> None:
    with pytest.raises(ValueError, match=rf"provider '{name}' is not in this onnxruntime .*, which has: .*cpu"):
        load(model.manifest.folder, provider=name)


def test_a_provider_that_takes_nothing_is_not_replaced_by_the_cpu(model: LanguageModel, monkeypatch: Any) -> None:
    """The Azure provider comes with the CPU package and has no operator of ours: ONNX Runtime would use the CPU."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["AzureExecutionProvider", "CPUExecutionProvider"])
    if "AzureExecutionProvider" not in AVAILABLE:
        pytest.skip("this onnxruntime has no Azure provider")
    with pytest.raises(ValueError, match="no part of the graph runs on 'azure', only on cpu"):
        load(model.manifest.folder, provider="azure")


def test_a_misspelt_provider(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"there is no provider 'cudaa'; did you mean 'cuda'\?"):
        load(model.manifest.folder, provider="cudaa")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sessions": "three"}, "sessions must be one of one, two, not 'three'"),
        ({"threads": 0}, "threads must be an integer of at least 1"),
        ({"threads": 1.5}, "threads must be"),
        ({"spinning": 1}, "spinning must be True or False, not 1"),
        ({"float32_prefill": True}, "needs a session of its own for prefill: sessions='two'"),
        ({"provider": ""}, "there is no provider ''"),
    ],
)
def test_wrong_options(model: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(model.manifest.folder, **options)


def test_the_model_tells_what_runs(model: LanguageModel) -> None:
    assert (model.provider, model.settings) == ("cpu", Settings("one", threads=1))
    assert model.settings.why["threads"] == "asked for"
    assert model.settings.why["sessions"].startswith("default: ")
    other = load(model.manifest.folder, provider="CPUExecutionProvider", sessions="two", threads=2, spinning=False)
    assert (other.provider, other.settings) == ("cpu", Settings("two", threads=2, spinning=False))


def fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: set[int]) -> None:
    def read(path: Path, *_: Any, **__: Any) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cpus, raising=False)


SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
HYPER = {SIBLINGS.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
QUOTA = "/sys/fs/cgroup/cpu.max"


@pytest.mark.parametrize(
    ("files", "cpus", "cores"),
    [
        (HYPER, set(range(8)), 4),
        (HYPER, {0, 4}, 1),
        (HYPER, {0, 1, 5}, 2),
        ({**HYPER, QUOTA: "max 100000\n"}, set(range(8)), 4),
        ({**HYPER, QUOTA: "150000 100000\n"}, set(range(8)), 2),
        ({**HYPER, QUOTA: "10000 100000\n"}, set(range(8)), 1),
        ({}, {0, 1, 2}, 3),
    ],
)
def test_counting_cores(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: set[int], cores: int) -> None:
    fake_files(monkeypatch, files, cpus)
    assert machine.physical_cores() == cores


def test_counting_cores_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert machine.physical_cores() == 0
