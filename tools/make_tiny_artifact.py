"""Make ``artifacts/tiny``, the committed artifact that the runtime's tests and examples open.

    python tools/make_tiny_artifact.py                  # artifacts/tiny
    python tools/make_tiny_artifact.py FOLDER --target onnx

A random llama of two layers with a byte-level tokenizer; heads of 16, so that target ``ort`` really has its fused
attention. Whoever changes the schema makes it anew and keeps the old one among the tests: old artifacts must load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402
from diptych.export.pipeline import ExportReport, export  # noqa: E402

TINY = tiny.llama(heads=(4, 2), head_size=16)


def make(output: Path, target: str = "ort") -> ExportReport:
    """Export ``TINY``, over an older one if there is one. Raises SystemExit when it does not agree with JAX."""
    with tempfile.TemporaryDirectory() as folder:
        source = tiny.write_huggingface(TINY, Path(folder) / "tiny")
        report = export(source, output, target=target, force=True)
    if report.verification["status"] != "passed":
        raise SystemExit(f"{output} is broken: {report.verification}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny artifact.")
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "artifacts" / "tiny")
    parser.add_argument("--target", default="ort")
    options = parser.parse_args()
    report = make(options.output, options.target)
    print(f"{report.path}: {sum(report.bytes.values()):,} bytes, verification {report.verification['status']}")


if __name__ == "__main__":
    main()
