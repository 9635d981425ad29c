"""Runs the examples in docstrings, with names that only a test can give, such as a run's directory."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any


def run_example(name: str, **names: Any) -> None:
    """Run the example of one public class or function, which imports what it needs but ``names``."""
    module_name, _, attribute = name.rpartition(".")
    module = importlib.import_module(module_name)
    text = inspect.getdoc(getattr(module, attribute)) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, module.__file__, 0)
    assert test.examples, f"{name} has no example in its docstring"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST).run(test, out=said.append)
    assert result.failed == 0, "".join(said)
