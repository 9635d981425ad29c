"""The names that users import, with signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator

from deploy.site.reference.text import WIDTH, bullets, docstring, page, paragraph, plain

MODULES = {
    "embeddings": None,
    "embeddings.optim": None,
    "embeddings.sse": None,
    "embeddings.rff": ("RandomFourierFeatures",),
    "embeddings.refresh.procrustes": ("procrustes", "rotate"),
    "embeddings.refresh.gate_metrics": ("compare",),
    "embeddings.store": ("open_store", "Store", "Collection"),
    "trainer.spec": ("parse_dataset", "parse_job", "load_documents", "JobSpec", "DatasetSpec"),
    "trainer.inference.predict": ("Predictor",),
    "trainer.inference.exported_model": ("Exported",),
    "service.client": None,
}
"""Names to document by module; None: all names in the module's ``__all__``."""


_OF_TORCH = {"extra_repr"}
"""Names of methods that are left out, as their docstrings are inherited from torch."""


def python_page() -> str:
    """Return the page of the modules that code outside this repository imports."""
    intro = (
        "Names for code outside this repository to import. Parts for your own torch modules, with examples: "
        "[library](../guides/library.md)."
    )
    parts = [intro]
    for name, chosen in MODULES.items():
        module = importlib.import_module(name)
        parts += [f"## {name}", paragraph(plain((module.__doc__ or "").partition("\n")[0]))]
        for one in chosen or module.__all__:
            parts += _name(one, getattr(module, one))
    return page("Python", "the packages", *parts)


def _name(name: str, value: object) -> list[str]:
    if isinstance(value, type) and value.__module__.startswith("trainer.spec"):
        page_of = {"JobSpec": "job.md", "DatasetSpec": "dataset.md"}[name]
        return [f"### {name}", f"Its fields: [{page_of.removesuffix('.md')}]({page_of})."]
    parts = [f"### {name}"]
    if callable(value):
        parts.append(f"```python\n{_signature(name, value)}\n```")
    parts.append(docstring(value))
    if isinstance(value, type):
        parts.append(bullets(_methods(value)))
    return parts


def _signature(name: str, value: object) -> str:
    """Return the signature as text, with a line for each parameter where one line would be too long."""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    parameters = [_shown(parameter) for parameter in signature.parameters.values() if parameter.name != "self"]
    kinds = [parameter.kind for parameter in signature.parameters.values() if parameter.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = signature.return_annotation
    result = "" if isinstance(value, type) or returned in (inspect.Signature.empty, None) else f" -> {returned}"
    short = f"{name}({', '.join(parameters)}){result}"
    if len(short) <= WIDTH // 2:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){result}"


def _shown(parameter: inspect.Parameter) -> str:
    marks: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    stars = marks.get(parameter.kind, "")
    annotation = "" if parameter.annotation is inspect.Parameter.empty else f": {parameter.annotation}"
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{annotation}{default}"


def _methods(value: type) -> Iterator[str]:
    """Yield the public methods that the class, or a base of the same package, defines."""
    package = value.__module__.partition(".")[0]
    for name in dir(value):
        method = inspect.getattr_static(value, name)
        call = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if name.startswith("_") or not isinstance(call, types.FunctionType | property):
            continue
        of = call.fget if isinstance(call, property) else call
        first = (inspect.getdoc(of) or "").partition("\n")[0]
        if of.__module__.startswith(package) and first and name not in _OF_TORCH:
            yield f"`{name}{'' if isinstance(call, property) else '()'}`: {plain(first)}"
