"""All bugs: most were found in other libraries, the rest are easily made. A patch is (old text, new text)."""

from .bugs import (
    accounting,
    cli,
    gradients,
    integrations,
    mechanism,
    methods,
    package,
    publishing,
    spending,
    tasks,
    trainer,
)
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *package.MUTANTS,
    *accounting.MUTANTS,
    *gradients.MUTANTS,
    *mechanism.MUTANTS,
    *tasks.MUTANTS,
    *methods.MUTANTS,
    *spending.MUTANTS,
    *publishing.MUTANTS,
    *trainer.MUTANTS,
    *integrations.MUTANTS,
    *cli.MUTANTS,
)
