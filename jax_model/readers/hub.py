"""Repositories of the Hugging Face Hub: what a checkpoint consists of, fetched into the Hub's own cache.

A repository is named ``owner/name``, or ``owner/name@revision`` for a branch, a tag or a commit.  Where the cache is,
which token is shown and whether to stay offline (``HF_HUB_OFFLINE``), all that the ``huggingface_hub`` package decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from diptych.jax_model import tokenizers
from diptych.jax_model.readers.huggingface import CONFIG, INDEX, weight_files

__all__ = ["fetch", "is_repository"]

_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_FILES = (".gguf", ".safetensors", ".json")
_TEXTS = (CONFIG, INDEX, *tokenizers.SOURCES, "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")


def is_repository(source: str | Path) -> bool:
    """Whether ``source`` can only mean a repository: it has the form of one and is not the beginning of a path."""
    found = _REPOSITORY.fullmatch(str(source))
    if found is None or str(source).endswith(_FILES):
        return False
    return not Path(source).exists() and not Path(found["name"]).parent.exists()


def fetch(source: str | Path, token: str | None = None) -> Path:
    """The folder in the Hub's cache that holds a repository's texts and weights, and nothing else that it may have.

    First come the texts, whose index says which weights there are; both are of one commit.  Raises FileNotFoundError
    when the repository, the revision or the Hub is out of reach and the cache has nothing, ValueError when access is
    refused.
    """
    found = _REPOSITORY.fullmatch(str(source))
    if found is None:
        raise ValueError(f"{source}: a repository of the Hub is named OWNER/NAME or OWNER/NAME@REVISION")
    folder = _snapshot(found["name"], found["revision"], _TEXTS, token)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{source}: this repository of the Hugging Face Hub has no {CONFIG}, so it is no model that can be read "
            "(download its .gguf files, if there are any, and name one)"
        )
    return _snapshot(found["name"], folder.name, weight_files(folder), token)


def _snapshot(name: str, revision: str | None, patterns: Sequence[str], token: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import tqdm

    class Bars(tqdm):
        """Progress on terminals only."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": not sys.stderr.isatty()})  # type: ignore[no-untyped-call]

    shown = name if revision is None else f"{name}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), token=token, tqdm_class=Bars
        )
    except GatedRepoError:
        problem = "access to it must be asked for on its page; then log in (hf auth login) or set HF_TOKEN"
        raise ValueError(f"{shown}: {problem}") from None
    except RevisionNotFoundError:
        raise FileNotFoundError(f"{shown}: the Hugging Face Hub has no such revision of it") from None
    except RepositoryNotFoundError:
        problem = "it is private (log in with hf auth login, or set HF_TOKEN) or it does not exist"
        raise FileNotFoundError(f"{shown}: no such path here, and on the Hugging Face Hub {problem}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        problem = "no such path here, not in the Hub's cache, and the Hugging Face Hub is out of reach"
        raise FileNotFoundError(f"{shown}: {problem} ({reason})") from None
    return Path(folder)
