"""HTTP routes, one module per kind of object; each exposes ``router``. :data:`MODULES` is what the app includes."""

MODULES: tuple[str, ...] = (
    "vectors",  # first: routes are tried in this order, and of all requests these must wait least
    "health",
    "keys",
    "audit",
    "datasets",
    "jobs",
    "internal",
    "schedules",
    "collections",
    "gate",
    "erasure",
    "views",
    "webhooks",
    "dashboard",
)
FEATURE_MODULES: tuple[str, ...] = ("vectors", "health", "collections", "views")


def for_role(role: str) -> tuple[str, ...]:
    """The modules that a process in this role answers with: a scheduler health alone, ``vectors`` what fetch needs."""
    if role == "scheduler":
        return ("health",)
    if role == "vectors":
        return tuple(module for module in FEATURE_MODULES if module in MODULES)
    return MODULES
