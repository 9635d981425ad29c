"""The HTTP layer: routes, and what applies to all of them (middleware, examples and links in the OpenAPI document)."""
