"""``diptych export``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from diptych.cli.console import print_json, progress_bars, show
from diptych.cli.options import Adapters, Json, parse_adapters
from diptych.cli.parity import cache_table, parity_table, quantization_table

Target = Literal["ort", "onnx", "primitive"]
Quantize = Literal["keep", "int4", "int8", "int4-body", "int4-nearest", "none"]
KvDtype = Literal["fp32", "fp16", "int8"]


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .gguf file, a Hugging Face folder, a Hub id or an Orbax checkpoint.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The artifact folder to make.", show_default=False)
    ],
    target: Annotated[
        Target,
        typer.Option("--target", help="ort: ONNX Runtime, fastest. onnx: standard operators. primitive: old ones."),
    ] = "ort",
    quantize: Annotated[
        Quantize | None,
        typer.Option(
            "--quantize",
            help="keep: a GGUF's own blocks, exactly. int4, int8: new ones, those of int4 wider where that matters. "
            "int4-body: all but embedding and head at 4 bits, smaller but coarser. int4-nearest: all at 4 "
            "bits and nothing searched, to compare with. Default: keep what there is, else none.",
            show_default=False,
        ),
    ] = None,
    accuracy_level: Annotated[
        int | None,
        typer.Option(
            "--accuracy-level",
            help="1 computes in float32, 4 with activations in 8 bits. Default: 4 where that costs next to nothing.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        KvDtype,
        typer.Option("--kv-dtype", help="Of the cache. int8: a quarter of the memory, scales made from a text."),
    ] = "fp32",
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=1, help="Longest sequence; default: the model's, at most 8192.")
    ] = None,
    adapter: Adapters = None,
    name: Annotated[str | None, typer.Option("--name", help="The artifact's name; default: the source's.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check ONNX Runtime against JAX.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that is there.")] = False,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Keep an artifact that failed its verification, marked as failed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint into an artifact and prove that both mean the same."""
    from diptych.export.certificate import ParityError
    from diptych.export.pipeline import export as export_checkpoint

    try:
        with progress_bars() as progress:
            report = export_checkpoint(
                source,
                output,
                target=target,
                quantize=quantize,
                accuracy_level=accuracy_level,
                kv_dtype=kv_dtype,
                max_context=max_context,
                adapters=parse_adapters(adapter),
                name=name,
                verify=verify,
                force=force,
                keep_failed=keep_failed,
                progress=progress,
            )
    except ParityError as error:
        verification = error.certificate.to_json()
        print_json({"verification": verification}) if as_json else show(parity_table(verification))
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in report.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    if as_json:
        print_json(report.to_json())
    else:
        show(parity_table(report.verification))
        if report.quantization is not None:
            show(quantization_table(report.quantization))
        if report.cache["dtype"] != "float32":
            show(cache_table(report.cache))
        print(f"Wrote {report.path}. Try: diptych run {report.path} 'Hello!'")
    if report.verification["status"] == "failed":  # and was kept, since --keep-failed said so
        raise typer.Exit(1)
