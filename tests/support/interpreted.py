"""Triton's interpreter, without a third of its work.

It puts its own functions in the place of Triton's language at each launch, and takes them away after it. It does so
again at each call of a device function in between, which finds all of them in place already, but looks through every
name of the language for it: a launch has a dozen of such calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_replace: Callable[[Any], Any] = interpreter._patch_lang


def _replace_once(fn: Any) -> Any:
    named = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if named and not any(tl.core.is_builtin(language.load) for language in named):
        return interpreter._LangPatchScope()  # with nothing to take away: the launch does
    return _replace(fn)


def install() -> None:
    interpreter._patch_lang = _replace_once
