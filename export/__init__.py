"""A checkpoint in, an artifact folder out, and the proof that both mean the same.

The package is callable, so that ``diptych.export(source, path)`` works although ``diptych.export`` is also the name of
this package. Importing it loads neither JAX nor ONNX; the first call does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from diptych.export.pipeline import export

        return export(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
