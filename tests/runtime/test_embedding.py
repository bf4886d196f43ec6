"""As an application uses the runtime: a few lines, signals, threads, memory that stays flat."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "artifacts" / "tiny"

TEN_LINES = """
import sys
from diptych.runtime import load

model = load(sys.argv[1], threads=1)
messages = [{"role": "user", "content": "Hello"}]
result = model.generate(messages, max_tokens=8, on_piece=lambda piece: print(piece, end=""))
print()
print(result.text, result.finish_reason, result.usage.prompt_tokens, sep="\\n")
print(*sorted(m for m in sys.modules if m.partition(".")[0] in {"jax", "onnx", "transformers", "torch", "typer"}))
"""


def test_ten_lines() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TEN_LINES, str(TINY)], capture_output=True, text=True, check=True, cwd="/"
    )
    streamed, text, reason, prompt, modules, _ = run.stdout.split("\n")
    assert streamed == text
    assert (reason, modules) == ("length", "")
    assert int(prompt) > 5
    assert run.stderr == ""


CTRL_C = """
import sys
from diptych.runtime import load

model = load(sys.argv[1], threads=1)
rows = model.session()
generation = model.stream([5, 6, 7], max_tokens=None, eos_token_id=[], session=rows)
try:
    while True:
        with model.stream([5, 6, 7], max_tokens=None, eos_token_id=[], session=rows) as generation:
            for piece in generation:
                print("running", flush=True)
except KeyboardInterrupt:
    warm = model.generate([5, 6, 7, 8], max_tokens=9, session=rows)
    cold = model.generate([5, 6, 7, 8], max_tokens=9)
    print("\\nstopped", generation.result.finish_reason, warm.token_ids == cold.token_ids)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c() -> None:
    process = subprocess.Popen([sys.executable, "-c", CTRL_C, str(TINY)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    last = output.splitlines()[-1]
    assert last.startswith("stopped")
    assert last.endswith("True")


FLAT = """
import sys
from pathlib import Path
from diptych.runtime import load

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

model = load(sys.argv[1], threads=1)
row = model.session(capacity=256)
sizes = []
for round in range(3):
    for length in range(1, 200):
        row.rewind(0)
        row.prefill(0, [5] * length)
    row.rewind(0)
    for step in range(1000):
        if not row.room(0):
            row.rewind(0)
        row.decode([5])
    for _ in range(50):
        model.generate([5] * 20, max_tokens=5)
    sizes.append(resident())
print(*sizes)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_memory_stays_flat() -> None:
    output = subprocess.check_output([sys.executable, "-c", FLAT, str(TINY)], text=True)
    _, warm, end = map(float, output.split())
    assert end - warm < 1  # MB
