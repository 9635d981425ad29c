"""HTTP: routes, and what holds for each of them: middleware, pages, idempotency, the OpenAPI document."""
