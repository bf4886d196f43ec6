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

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout: element i turns with i +
    width/2.

    Position p turns pair i by the angle ``p * base ** (-2 i / width) / factor``; ``factor`` is the linear scaling of
    positions (Chen et al. 2023, arXiv:2306.15595) and is 1 where a model has none.
    """

    base: float
    width: int
    factor: float = 1.0


@dataclass(frozen=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope
    window: int | None = None  # position i sees j where 0 <= i - j < window; None: everything before it


@dataclass(frozen=True)
class Config:
    """Everything that decides the computation, apart from the weights."""

    family: str  # for people and manifests; no code branches on it
    V: int
    D: int
    F: int
    N: int
    K: int
    H: int
    layers: tuple[Layer, ...]
    max_positions: int  # the longest sequence the model was made for
    norm_eps: float
    tied: bool  # the output head is the embedding
    attn_scale: float  # multiplies q·k
    activation: Activation = "silu"
    qk_norm: bool = False  # RMS norm of each query and key head, before rope
    post_norms: bool = False  # what attention and MLP return is normalised before it joins the residual
    embed_scale: float = 1.0  # multiplies the embedded tokens; rounded to the parameters' dtype first
    norm_scale_first: bool = False  # Gemma scales before it rounds to the parameters' dtype; Llama rounds, then scales

    @property
    def L(self) -> int:
        return len(self.layers)

    def sizes(self) -> dict[str, int]:
        """The sizes behind the lower-case axis letters of parameter layouts."""
        return {letter.lower(): getattr(self, letter) for letter in "VDFNKH"}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Config:
        """Inverse of :meth:`to_json`. Raises TypeError on unknown or missing fields."""
        layers = tuple(Layer(**{**layer, "rope": Rope(**layer["rope"])}) for layer in data["layers"])
        return cls(**{**data, "layers": layers})
