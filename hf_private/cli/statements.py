"""Statements (privacy.json) of saved models, for commands that read and rewrite them."""

from typing import Any

from .arguments import UsageError


def read_statement(folder: str, argument: str) -> dict[str, Any]:
    """Read and validate the statement of a saved model; errors name `argument`."""
    from hf_private.publishing.schema import violations
    from hf_private.spending.statement import read_statement, schema

    must = f"argument {argument}: must be a folder with a valid privacy.json, got {folder!r}"
    try:
        statement = read_statement(folder)
    except ValueError as error:
        raise UsageError(f"{must}: {error}") from error
    if statement is None:
        raise UsageError(must)
    violation = next(violations(statement, schema()), None)
    if violation is not None:
        raise UsageError(f"{must}: {violation}")
    return statement
