"""Ours beside other runtimes, in one run: same machine, same tokens, alternating rounds.

    make bench                                        # the artifact of `make demo`, and JAX
    make bench PEERS=1                                # and onnxruntime-genai, llama.cpp, OpenVINO GenAI, set up first
    PYTHONPATH=tools python -m bench gemma-3-270m artifacts/gemma-3-270m-int4 --engines llama_cpp --quick

Every round is kept in ``build/bench/``: the same command goes on where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo
import fetch_models
from bench import export_engine, peers, plots
from bench.peers import PEERS, PeerError
from diptych.bench import report, run
from diptych.bench.engines import EngineError, Spec
from diptych.bench.plan import Plan
from diptych.cli.console import show
from diptych.runtime import Manifest
from diptych.runtime.machine import physical_cores

OUTPUT = demo.ROOT / "build" / "bench"
JAX = "jax"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    count = options.threads or physical_cores() or os.cpu_count() or 1
    plan = Plan.quick(count) if options.quick else Plan(threads=count)
    folders = options.artifacts or [demo.ROOT / demo.artifact_of(options.model)]
    try:
        artifacts, plan, vocabulary = run.artifacts(folders, plan)
        ours = [replace(spec, name=f"diptych {spec.name}" if artifacts[1:] else "diptych") for spec in artifacts]
        specs = [*ours, *_others(options, folders[0], ours[0], plan)]
        name = demo.artifact_name(options.model)
        output = options.output or OUTPUT / f"{name}{'-quick' if options.quick else ''}"
        if options.again:
            for kept in ("rounds.json", "export.json"):
                (output / kept).unlink(missing_ok=True)
        export = None if options.no_export else _export(options.model, folders[0], output)
        done = run.go(specs, plan, vocabulary, options.rounds, _say, output / "rounds.json")
    except (EngineError, PeerError, fetch_models.FetchError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    found = {"model": name} | report.summary(specs, plan, done, export)
    (output / "bench.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(*report.tables(found))
    _plot(found, output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Prefill and decode of ours and others, measured apart.")
    parser.add_argument("model", nargs="?", default=fetch_models.DEFAULT, help="what `make demo` takes")
    parser.add_argument("artifacts", nargs="*", type=Path, help="artifacts of that model; default: the demo's")
    known = [JAX, *(peer.name for peer in PEERS)]
    parser.add_argument(
        "--engines",
        type=lambda text: [name for name in text.split(",") if name],
        help=f"of {', '.join(known)}; default: JAX and what is installed",
    )
    parser.add_argument("--peers", action="store_true", help="install the engines that are not there")
    parser.add_argument("--no-export", action="store_true", help="do not measure what an export takes")
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of every engine; default: the physical cores")
    parser.add_argument("--output", type=Path, help="folder for rounds, figures and plots; default: build/bench/MODEL")
    parser.add_argument("--again", action="store_true", help="forget the rounds that are there")
    return parser


def _export(model: str, artifact: Path, output: Path) -> dict[str, Any]:
    """What the artifact's export takes; measured once and kept, as rounds are."""
    kept, options = output / "export.json", export_engine.options_of(Manifest.open(artifact))
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if found.get("options") != options:
        _say("exporting once more, to measure it")
        found = export_engine.cost(Path(demo.source_of(model)), options, output)
        kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return dict(found)


def _others(options: argparse.Namespace, artifact: Path, ours: Spec, plan: Plan) -> list[Spec]:
    wanted = options.engines
    unknown = set(wanted or ()) - {JAX, *(peer.name for peer in PEERS)}
    if unknown:
        raise ValueError(f"there is no engine {', '.join(sorted(unknown))}")
    specs = [_jax(artifact, ours, plan)] if wanted is None or JAX in wanted else []
    source: Path | None = None
    for peer in PEERS:
        if wanted is not None and peer.name not in wanted:
            continue
        try:
            if options.peers and not peer.is_installed():
                _say(f"installing {peer.name} into {peer.python.parents[1]}")
                peers.install(peer)
            if peer.is_installed():
                source = source or Path(demo.source_of(options.model))
                specs.append(peers.spec(peer, source, plan))
        except PeerError as error:
            _say(f"without {peer.name}: {error}")
    return specs


def _jax(artifact: Path, ours: Spec, plan: Plan) -> Spec:
    """On the weights of the first artifact, as the arrays that they mean."""
    options = {"model": str(artifact), "capacity": plan.capacity}
    environment = {"BENCH_THREADS": str(plan.threads), "JAX_PLATFORMS": "cpu"}
    adapter = peers.ENGINES / "jax_model.py"
    return replace(ours, name=JAX, adapter=adapter, options=options, batches=False, read=None, environment=environment)


def _plot(found: dict[str, object], output: Path) -> None:
    try:
        files = plots.draw(found, output)
    except ModuleNotFoundError:
        _say("no plots: they need matplotlib, pip install 'diptych[bench]'")
        return
    _say(f"figures and plots are in {output}: {', '.join(file.name for file in files)}")


def _say(remark: str) -> None:
    print(remark, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
