"""The architecture of a decoder as data: frozen, hashable, complete.

Nothing reads a checkpoint's own configuration, or a model's name, once a :class:`Config` exists.  Its letters are the
ones that array shapes are written with everywhere in the project:

====== =============================== ====== ===========================
letter meaning                         letter meaning
====== =============================== ====== ===========================
B      rows (sequences)                N      query heads
T      new tokens                      K      key/value heads
S      cache capacity                  H      head size
P      positions with logits wanted    V      vocabulary
D      width                           L      layers
F      feed-forward width              E      experts
====== =============================== ====== ===========================
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from diptych.jax_model.rope import Rope

Activation = Literal["gelu", "gelu_tanh", "relu_squared", "silu"]
Norm = Literal["rms", "layer"]
Placement = Literal["before", "around", "after", "parallel"]
QkNorm = Literal["head", "width", "head_after_rope"]
CacheDtype = Literal["float32", "float16", "int8"]

# A cache of integers has scales [K, H] for keys and for values, which are parameters of each layer's attention.
CACHE_SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Experts:
    """A feed-forward layer of E experts, of which a router chooses ``top_k`` for each token (arXiv:2101.03961).

    The router's scores are a softmax over all experts; the chosen ones are weighted by their scores, which are first
    divided by their sum where ``normalised`` is set.  ``shared_F`` is the width of one more expert that every token
    passes through (0: none), weighted by a sigmoid gate of its own where ``shared_gate`` is set.

    An expert's gate g multiplies u to ``g · sigmoid(alpha · g) · (u + beta)``, which is SiLU's by default; with a
    ``limit``, g is clipped to at most that and u to ±that first.

    DeepSeek's routers (arXiv:2412.19437) may score by sigmoids; choose by the score plus a correction, where
    ``corrected``; choose from the ``top_groups`` of ``groups`` only, where the sum of its ``group_top`` best ranks a
    group; and multiply all weights by ``scale``.
    """

    E: int
    top_k: int
    F: int
    normalised: bool
    shared_F: int = 0
    shared_gate: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope | None  # None: no rotary embedding
    window: int | None = None  # position i sees j where 0 <= i - j < window; None: everything before it
    experts: Experts | None = None  # None: one feed-forward layer of width F


@dataclass(frozen=True, kw_only=True)
class LatentLayer(Layer):
    """A layer with multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, §2.1).

    All heads share what the cache holds of a token: the ``rank`` elements that keys and values are made from, behind
    the ones that rope turns.  So there is one key/value head (K = 1) of size H = rope's width + ``rank``.  What would
    make keys and values of the shared elements is applied to queries and to attention's result instead.
    """

    rank: int
    key: int  # elements of a head's key that rope does not turn
    value: int  # elements of a head's value
    query_rank: int | None  # queries are made from that many elements; None: from the layer's input


@dataclass(frozen=True)
class Config:
    """Everything that decides the computation, apart from the weights."""

    family: str  # for people and manifests, and to find the table of parameters; no computation depends on it
    V: int
    D: int
    F: int
    N: int
    K: int
    H: int
    layers: tuple[Layer, ...]
    max_positions: int  # the longest sequence
    norm_eps: float
    tied: bool  # the output head is the embedding
    attn_scale: float  # multiplies q·k
    activation: Activation = "silu"
    gated: bool = True  # the activated gate multiplies a second projection
    norm: Norm = "rms"
    # Where norms stand: "before" attention and MLP; "around", before and after; "after", before what they return joins
    # the residual; "parallel": attention and MLP both read the layer's input, and their sum joins the residual.
    norm_placement: Placement = "before"
    norm_scale_first: bool = False  # Gemma scales before it rounds to the parameters' dtype; Llama rounds, then scales
    qk_norm: QkNorm | None = None  # RMS norm of each query and key head, or of all of them, before or after rope
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: bool = False  # a vector per position is added to the embedded tokens
    qkv_clip: float | None = None  # queries, keys and values are clipped to ±this
    attn_softcap: float | None = None  # scores become cap · tanh(score / cap)
    logit_softcap: float | None = None
    embed_scale: float = 1.0  # multiplies the embedded tokens; rounded to the parameters' dtype first
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual
    logit_scale: float = 1.0

    @property
    def L(self) -> int:
        return len(self.layers)

    def sizes(self, layer: Layer | None = None) -> dict[str, int]:
        """The sizes behind the letters of parameter layouts, see :mod:`diptych.jax_model.families.table`."""
        sizes = {letter.lower(): getattr(self, letter) for letter in "VDFNKH"}
        sizes |= {"p": self.max_positions, "o": (self.N + 2 * self.K) * self.H, "j": self.H // 2}
        sizes |= {"g": self.N // self.K, "group": self.N // self.K + 2, "one": 1, "two": 2, "three": 3}
        if layer is not None and layer.experts is not None:
            sizes |= {"e": layer.experts.E, "m": layer.experts.F, "s": layer.experts.shared_F}
        if isinstance(layer, LatentLayer):
            sizes |= {"key": layer.key + self.H - layer.rank, "rank": layer.rank, "qrank": layer.query_rank or 0}
            sizes |= {"nope": layer.key, "value": layer.value, "keyvalue": layer.key + layer.value}
        return sizes

    def to_json(self) -> dict[str, Any]:
        layers = [
            {**asdict(layer), "rope": None if layer.rope is None else layer.rope.to_json()} for layer in self.layers
        ]
        return {**asdict(self), "layers": layers}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Config:
        """Inverse of :meth:`to_json`. Raises TypeError on unknown or missing fields."""
        return cls(**{**data, "layers": tuple(map(_layer, data["layers"]))})


def _layer(data: dict[str, Any]) -> Layer:
    kind = LatentLayer if "rank" in data else Layer
    rope, experts = data["rope"], data["experts"]
    rope = None if rope is None else Rope.from_json(rope)
    return kind(**{**data, "rope": rope, "experts": None if experts is None else Experts(**experts)})
