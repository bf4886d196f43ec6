"""The gate: JAX against ONNX Runtime, on the user's own weights, through the runtime that ships.

Two rows of different lengths are read in two chunks each, then some tokens are decoded.  JAX goes first and its greedy
tokens are fed to both sides, so that every step compares the same state; its weights are gone before ONNX Runtime loads
the artifact's.  ``export`` runs this against the checkpoint itself, so what it finds owes nothing to our writer.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol, cast, get_args

import jax
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

from diptych.export import quality
from diptych.export.accuracy import Tolerance
from diptych.export.artifact import MANIFEST, WEIGHTS, describe_file
from diptych.export.certificate import Certificate, Check, Progress, quiet
from diptych.export.exact import in_float32
from diptych.export.prompts import LONG, SHORT, arbitrary
from diptych.export.stored import Stored, max_abs_error
from diptych.jax_model import params as parameters
from diptych.jax_model.config import CacheDtype, Config
from diptych.jax_model.decoder import Cache, decode, prefill
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from diptych.jax_model.readers.orbax import own_config
from diptych.jax_model.storage import Storage
from diptych.jax_model.storage import from_json as forms_from_json
from diptych.runtime.manifest import Manifest
from diptych.runtime.programs import Programs, open_programs
from diptych.runtime.session import NonFiniteLogits, Session
from diptych.runtime.settings import choose

__all__ = ["TOLERANCES", "verify"]

Logits = NDArray[np.float32]


TOLERANCES = {
    "files": Tolerance(0.0, "a hash is equal or it is not"),
    "weights": Tolerance(0.0, "float32 to float32 is a copy"),
    "blocks": Tolerance(
        1.0,
        "the same integers and scales: a product and two sums are rounded, by half a unit at most",
    ),
    "quantised": Tolerance(
        0.25,
        "four bits lose 7 to 9 % of a matrix, eight bits 0.5 %; a wrong order of anything loses over 100 %",
    ),
    "logits": Tolerance(
        1e-3,
        "both sides compute in float32 and differ in the order of their sums: measured 1e-5 to 1e-4 on logits of size "
        "10 to 50; a lost norm, a wrong position or a lost key moves them by more than 0.01",
    ),
    "shipped.kl": Tolerance(
        0.03,
        "activations in 8 bits: measured 0.004, on few positions; the lowering itself is held "
        "to the tolerance of logits in float32 arithmetic. A cache in int8: both sides round it, and the last bits of "
        "their sums decide which way, so that they drift apart by what rounding costs",
    ),
    "cache.kl": Tolerance(0.1, "int8 costs 0.002 to 0.005 on text; scales that are a fifth too small, up to 0.11"),
    "cache.greedy": Tolerance(0.1, "measured below 0.01: tokens that are nearly as likely change places"),
    "shipped.greedy": Tolerance(0.03, "measured 0.001: tokens that are nearly as likely change places"),
    "greedy": Tolerance(1e-3, "two tokens whose logits are closer than the sums' rounding have no order"),
}
LONG_PROMPT, SHORT_PROMPT = 600, 48  # tokens: over the window of 512 that Gemma 3 has; and a question
POSITIONS = 8  # positions of a row's chunk whose logits are compared


def verify(
    artifact: str | Path,
    *,
    source: str | Path | None = None,
    adapters: Sequence[tuple[str | Path, float]] = (),
    steps: int | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Check an artifact: its files against their hashes, then ONNX Runtime against JAX over ``steps`` decode steps.

    JAX's weights are those of ``source``, the checkpoint with ``adapters`` merged, and the artifact's must equal them
    exactly; without a source, or where the artifact was quantised, they are the artifact's own.  ``steps`` is 32, or
    half of a very short context.  Raises FileNotFoundError where there is no artifact, ValueError where it is
    malformed, was made from another model than ``source``, or has no room for ``steps``.
    """
    if adapters and source is None:
        raise ValueError("adapters change a source: name the one that the artifact was made from as well")
    folder = Path(artifact)
    manifest = Manifest.open(folder)
    files = _check_files(manifest)
    if not files.passed:  # what broken files compute says nothing
        return Certificate((files,))
    config, cache_dtype = _config(manifest), _cache_dtype(manifest)
    plan = Plan.make(_tokenizer(folder), config.V, manifest.max_context, steps)
    with jax.default_device(jax.devices("cpu")[0]):
        if source is None:
            params, weights = _own_weights(manifest, config)
        else:
            params, weights = _weights_of(open_checkpoint(source, adapters), manifest, config)
        expected = list(_counted(_trajectory(JaxRunner(config, params, plan), plan), "JAX", plan, progress or quiet))
        chosen = [greedy(step.logits_BPV) for step in expected]
        rounded = expected
        if cache_dtype != "float32":
            params = parameters.with_cache_scales(folder / WEIGHTS, config, params, cache_dtype)
            rounded = list(_trajectory(JaxRunner(config, params, plan, cache_dtype), plan, chosen))
        del params
    rounds = ["activations in 8 bits"] * (_accuracy_level(manifest) != 1)
    rounds += [f"cache in {cache_dtype}"] * (cache_dtype != "float32")
    programs = open_programs(manifest, choose({"sessions": "two"}))
    runner = RuntimeRunner(_in_float32(programs) if rounds else programs, plan)
    del programs
    found = _counted(_trajectory(runner, plan, chosen), "ONNX Runtime", plan, progress or quiet)
    again = [Step("decode.one", step.logits_BPV) for step in expected if step.check == "decode"]
    checks = compare(plan.checks(), [*expected, *again], chain(found, _steps_again(runner, plan, chosen)))
    del runner, found
    if rounded is not expected:
        checks += compare_probabilities("cache", f"cache in {cache_dtype}, not float32", expected, rounded)
    if rounds:
        shipped = open_programs(manifest, choose({"sessions": "one" if cache_dtype == "float32" else "two"}))
        found = _trajectory(RuntimeRunner(shipped, plan), plan, chosen)
        checks += compare_probabilities("shipped", f"{' and '.join(rounds)} as shipped", rounded, found)
    return Certificate((files, *weights, *checks))


# -------------------------------------------------------------------------------------------------------- what is read


@dataclass(frozen=True)
class Plan:
    """Which tokens both sides read: ``chunks[c][row]``, then ``steps`` tokens that JAX chooses."""

    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    steps: int

    @classmethod
    def make(cls, tokenizer: Tokenizer | None, V: int, max_context: int, steps: int | None) -> Plan:
        """Two ragged rows in two ragged chunks. Raises ValueError when ``steps`` leave no room for a prompt."""
        steps = min(32, max_context // 2) if steps is None else steps
        room = max_context - steps
        if steps < 1 or room < 4:
            raise ValueError(f"{steps} decode steps do not fit into a context of {max_context} tokens with a prompt")
        long = _tokens(tokenizer, LONG, V, min(LONG_PROMPT, room))
        short = _tokens(tokenizer, SHORT, V, max(2, min(SHORT_PROMPT, room // 2)))
        halves = [
            (row[: split(len(row))], row[split(len(row)) :]) for row, split in zip((long, short), _SPLITS, strict=True)
        ]
        return cls(tuple(zip(*halves, strict=True)), steps)

    @property
    def rows(self) -> int:
        return len(self.chunks[0])

    @property
    def T(self) -> int:
        return max(len(tokens) for chunk in self.chunks for tokens in chunk)

    def checks(self) -> dict[str, str]:
        """What is compared, by the checks' names."""
        first, second = (" and ".join(str(len(tokens)) for tokens in chunk) for chunk in self.chunks)
        return {
            "prefill.first": f"rows of {first} tokens in an empty cache",
            "prefill.second": f"{second} tokens more behind them",
            "decode": f"{self.steps} steps of {self.rows} rows",
            "decode.one": "the same steps in prefill's graph, as with one session",
            "greedy": "logit given up where the greedy tokens differ",
        }

    def positions(self, tokens: Sequence[int]) -> list[int]:
        """Positions of one row's chunk whose logits are compared: spread evenly, the last one last."""
        return [int(i) for i in np.linspace(0, len(tokens) - 1, POSITIONS).round()]


# Where a row is cut: the rows' chunks differ in length, and so does which of the two is longer.
_SPLITS: tuple[Callable[[int], int], ...] = (lambda n: n // 2, lambda n: 1 + n // 3)


def _tokens(tokenizer: Tokenizer | None, text: str, V: int, count: int) -> tuple[int, ...]:
    """The first ``count`` tokens of ``text``, read again from its start as often as it takes."""
    ids = [] if tokenizer is None else [i for i in tokenizer.encode(text).ids if i < V]
    if not ids:
        ids = arbitrary(V, count)
    return tuple(ids[i % len(ids)] for i in range(count))


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_str(path.read_text(encoding="utf-8")) if path.is_file() else None


# ------------------------------------------------------------------------------------------------------ the two sides


class Runner(Protocol):
    """One side. ``prefill`` appends a chunk to every row and returns logits [B, P, V], ``decode`` a token, [B, V]."""

    def prefill(self, chunk: Sequence[Sequence[int]]) -> Logits: ...

    def decode(self, tokens: NDArray[np.int32]) -> Logits: ...


class JaxRunner:
    """The jitted JAX functions; both chunks are padded to one shape, so that each function compiles once."""

    def __init__(
        self, config: Config, params: parameters.Params, plan: Plan, cache_dtype: CacheDtype = "float32"
    ) -> None:
        self._config, self._params, self._plan = config, params, plan
        self._cache = Cache.zeros(config, plan.rows, 2 * plan.T + plan.steps, cache_dtype)

    def prefill(self, chunk: Sequence[Sequence[int]]) -> Logits:
        tokens_BT = np.zeros((self._plan.rows, self._plan.T), np.int32)
        for row, tokens in enumerate(chunk):
            tokens_BT[row, : len(tokens)] = tokens
        num_tokens = np.array([len(tokens) for tokens in chunk], np.int32)
        positions = np.array([self._plan.positions(tokens) for tokens in chunk], np.int32)
        logits, self._cache = prefill(self._config, self._params, self._cache, tokens_BT, num_tokens, positions)
        return np.asarray(logits)

    def decode(self, tokens: NDArray[np.int32]) -> Logits:
        logits, self._cache = decode(self._config, self._params, self._cache, tokens)
        return np.asarray(logits)


class RuntimeRunner:
    """What ships: the artifact in the runtime, its rows prefilled one after the other, its cache growing as it must."""

    def __init__(self, programs: Programs, plan: Plan) -> None:
        self._plan = plan
        self._session = Session(programs, rows=plan.rows)

    def prefill(self, chunk: Sequence[Sequence[int]]) -> Logits:
        return np.stack([self._prefill_row(row, tokens) for row, tokens in enumerate(chunk)])

    def _prefill_row(self, row: int, tokens: Sequence[int]) -> Logits:
        try:
            return self._session.prefill(row, tokens, logits=self._plan.positions(tokens))
        except NonFiniteLogits as error:  # a finding, not a fault of ours: no check passes with these
            return error.logits

    def decode(self, tokens: NDArray[np.int32]) -> Logits:
        try:
            return self._session.decode(tokens)
        except NonFiniteLogits as error:
            return error.logits

    def decode_by_prefill(self, tokens: NDArray[np.int32]) -> Logits:
        return np.concatenate([self._prefill_row(row, [token])[:1] for row, token in enumerate(tokens.tolist())])

    def rewind(self, steps: int) -> None:
        """Forget the last tokens of every row; one whose steps failed never held them."""
        for row, length in enumerate(self._session.lengths.tolist()):
            self._session.rewind(row, max(0, length - steps))


# --------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Step:
    """One call of one side."""

    check: str
    logits_BPV: Logits


def _trajectory(runner: Runner, plan: Plan, chosen: Sequence[NDArray[np.int32]] | None = None) -> Iterator[Step]:
    """Every call in order. ``chosen`` are the tokens to follow each step with; None takes the greedy ones."""
    names = ("prefill.first", "prefill.second", *["decode"] * plan.steps)
    tokens = np.zeros(0, np.int32)
    for i, name in enumerate(names):
        logits_BPV = runner.prefill(plan.chunks[i]) if i < len(plan.chunks) else runner.decode(tokens)[:, None]
        tokens = greedy(logits_BPV) if chosen is None else chosen[i]
        yield Step(name, logits_BPV)


def _steps_again(runner: RuntimeRunner, plan: Plan, chosen: Sequence[NDArray[np.int32]]) -> Iterator[Step]:
    """The decode steps of a trajectory that is at its end once more, in prefill's graph."""
    runner.rewind(plan.steps)
    for tokens in chosen[len(plan.chunks) - 1 : -1]:
        yield Step("decode.one", runner.decode_by_prefill(tokens)[:, None])


def greedy(logits_BPV: Logits) -> NDArray[np.int32]:
    """The likeliest token behind each row's last position, [B]."""
    return np.asarray(logits_BPV[:, -1].argmax(-1), np.int32)


def compare(what: Mapping[str, str], expected: Sequence[Step], found: Iterator[Step]) -> list[Check]:
    """The checks named by ``what``: one for each kind of call, and one on which token is likeliest."""
    errors: dict[str, list[float]] = {name: [] for name in what}
    counts = dict.fromkeys(what, 0)
    for one, other in zip(expected, found, strict=True):
        errors[one.check].append(max_abs_error(one.logits_BPV, other.logits_BPV))
        errors["greedy"].append(given_up(one, other))
        counts[one.check] += one.logits_BPV.size
        counts["greedy"] += one.logits_BPV[..., 0].size
    return [check(name, what[name], counts[name], errors[name]) for name in what]


def compare_probabilities(name: str, what: str, expected: Sequence[Step], found: Iterable[Step]) -> list[Check]:
    """Where activations or the cache are rounded: single logits move, what they say must not."""
    pairs = list(zip(expected, found, strict=True))
    V = expected[0].logits_BPV.shape[-1]
    log_p, log_q = (
        quality.log_softmax(np.concatenate([pair[i].logits_BPV.reshape(-1, V) for pair in pairs])) for i in range(2)
    )
    p, chosen = np.exp(log_p), log_q.argmax(-1)[:, None]
    lost = float((p.max(-1) - np.take_along_axis(p, chosen, -1)[:, 0]).mean())
    kl, _ = quality.divergence(log_p, log_q)
    return [
        check(f"{name}.kl", f"mean KL divergence, {what}", len(p), [kl]),
        check(f"{name}.greedy", "mean probability given up where the greedy tokens differ", len(p), [lost]),
    ]


def given_up(expected: Step, found: Step) -> float:
    """How much logit the other side's greedy tokens cost at worst: 0 where all are the same."""
    logits, theirs = expected.logits_BPV, found.logits_BPV.argmax(-1)
    return float((logits.max(-1) - np.take_along_axis(logits, theirs[..., None], -1)[..., 0]).max())


_TWO_DIGITS = decimal.Context(prec=2, rounding=decimal.ROUND_CEILING)  # more differ between machines and tell nothing


def check(name: str, what: str, count: int, errors: Sequence[float]) -> Check:
    """A check from the errors that were measured; it says the worst, rounded up to two digits."""
    tolerance = TOLERANCES.get(name, TOLERANCES["logits"]).value
    if any(map(math.isnan, errors)):
        return Check(name, what, count, None, tolerance, False)
    worst = float(_TWO_DIGITS.create_decimal_from_float(max(errors, default=0.0)))
    return Check(name, what, count, worst, tolerance, worst <= tolerance)


def _counted(steps: Iterator[Step], stage: str, plan: Plan, progress: Progress) -> Iterator[Step]:
    total = len(plan.chunks) + plan.steps
    for done, step in enumerate(steps, 1):
        progress(f"verify: {stage}", done, total)
        yield step


def _accuracy_level(manifest: Manifest) -> int:
    return int((manifest.data.get("quantization") or {}).get("accuracy_level", 1))


def _in_float32(programs: Programs) -> Programs:
    """The artifact's programs with all their arithmetic in float32: what they must agree with JAX in, to rounding."""
    manifest = programs.manifest
    prefill, decode = (_session_in_float32(manifest, name) for name in ("prefill", "decode"))
    widened = replace(manifest, cache=replace(manifest.cache, dtype="float32"))
    return replace(programs, manifest=widened, prefill=prefill, decode=decode)


def _session_in_float32(manifest: Manifest, program: str) -> ort.InferenceSession:
    model = ir.load(manifest.folder / manifest.programs[program].file)
    in_float32(model)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(manifest.folder))
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


# --------------------------------------------------------------------------------------------------- files and weights


def _check_files(manifest: Manifest) -> Check:
    described = {name: asdict(entry) for name, entry in manifest.files.items()}
    changed = [name for name, entry in described.items() if describe_file(manifest.folder / name) != entry]
    what = f"{', '.join(changed)} changed since the export" if changed else "files equal their hashes"
    return Check("files", what, len(described), float(len(changed)), TOLERANCES["files"].value, not changed)


def _own_weights(manifest: Manifest, config: Config) -> tuple[parameters.Params, list[Check]]:
    """The artifact's parameters, blocks as the arrays that they mean: XLA would unpack integers at every step."""
    storage, _ = _storage(manifest)
    return parameters.dense(parameters.read_safetensors(manifest.folder / WEIGHTS, config, storage)), []


def _weights_of(checkpoint: Checkpoint, manifest: Manifest, config: Config) -> tuple[parameters.Params, list[Check]]:
    """The parameters that the artifact should have, and whether it has them.

    Those are the checkpoint's; but where the artifact was quantised, they are its own, and the check says how far they
    are from the checkpoint's.
    """
    if parameters.configure(checkpoint, manifest.max_context) != config:
        made = f"{manifest.folder} was made from another model than {checkpoint.path}"
        raise ValueError(f"{made}: their configurations differ")
    storage, scheme = _storage(manifest)
    kept = scheme in ("none", "keep")
    stored = Stored(manifest.folder, storage, kept=kept)
    leaves: dict[str, jax.Array] = {}
    for path, value, _ in parameters.stream(checkpoint, config):
        stored.compare(path, value)
        if kept:
            leaves[path] = jax.numpy.asarray(value)
    checks = []
    if stored.floats.count:
        checks.append(check("weights", "the checkpoint's values, stored", stored.floats.count, stored.floats.errors))
    if stored.blocks.count:
        name = "blocks" if kept else "quantised"
        checks.append(check(name, _BLOCKS[name], stored.blocks.count, stored.blocks.errors))
    params = parameters.unflatten(leaves) if kept else _own_weights(manifest, config)[0]
    return params, checks


_BLOCKS = {
    "blocks": "units in the last place between the checkpoint's blocks and ours",
    "quantised": "relative error of the worst matrix",
}


def _config(manifest: Manifest) -> Config:
    """Raises ValueError where the artifact's configuration or parameters are not those of this version's JAX model."""
    config = own_config(manifest.data["config"], manifest.folder / MANIFEST)
    leaves = parameters.flatten(parameters.abstract(config, storage=_storage(manifest)[0]))
    if absent := [path for path in leaves if path not in manifest.data["tensors"]]:
        raise ValueError(
            f"{manifest.folder} has no parameter {absent[0]!r}: an earlier version exported it. It runs as before, but "
            "to verify it, export it again"
        )
    return config


def _cache_dtype(manifest: Manifest) -> CacheDtype:
    """Raises ValueError for a cache that the JAX model does not have."""
    for dtype in get_args(CacheDtype):
        if dtype == manifest.cache.dtype:
            return cast(CacheDtype, dtype)
    raise ValueError(f"{manifest.folder}/manifest.json: there is no cache of {manifest.cache.dtype!r}")


def _storage(manifest: Manifest) -> tuple[Storage, str]:
    """How the artifact's parameters are stored, and by what scheme."""
    quantization = manifest.data.get("quantization")
    if quantization is None:
        return {}, "none"
    try:
        return forms_from_json(quantization["tensors"]), str(quantization["scheme"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{manifest.folder}/manifest.json: quantization is malformed: {error!r}") from None
