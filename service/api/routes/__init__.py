"""HTTP routes, one module per kind of object; each exposes ``router``. The app includes those in :data:`MODULES`."""

MODULES: tuple[str, ...] = (
    "vectors",  # first: routes are matched in this order, and these requests must be answered fastest
    "health",
    "keys",
    "audit",
    "datasets",
    "jobs",
    "internal",
    "schedules",
    "collections",
    "recommend",
    "gate",
    "erasure",
    "views",
    "webhooks",
    "dashboard",
)
FEATURE_MODULES: tuple[str, ...] = ("vectors", "health", "collections", "recommend", "views")


def for_role(role: str) -> tuple[str, ...]:
    """Return the route modules for a role: health for ``scheduler``, routes that fetch vectors for ``vectors``."""
    if role == "scheduler":
        return ("health",)
    if role == "vectors":
        return FEATURE_MODULES
    return MODULES
