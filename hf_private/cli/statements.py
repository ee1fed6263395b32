"""Statements (privacy.json) of saved and published models, for commands that read them."""

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


def read_release(path_or_repo: str) -> dict[str, Any]:
    """Read and validate the statement of a folder or of a repository on the Hub."""
    from hf_private.publishing.verify import read

    statement, problem = read(path_or_repo)
    if statement is None or problem is not None:
        reason = f": {problem.message}" if problem else ""
        raise UsageError(f"argument PATH_OR_REPO: must hold a valid privacy.json, got {path_or_repo!r}{reason}")
    return statement
